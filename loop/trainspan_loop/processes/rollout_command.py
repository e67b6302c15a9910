"""`trainspan rollout` as the loop runs it: until the collector has every verdict."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import IO

from trainspan_loop.processes.child_processes import Commands
from trainspan_loop.processes.services import Services
from trainspan_loop.state.run_folder import RunFolder
from trainspan_rollouts.ledger.recorded import recorded_agent
from trainspan_schemas.agents.functions import is_function_name
from trainspan_schemas.command_events import UNFINISHED, Event, Progress, RunResult
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ProcessError
from trainspan_schemas.telemetry.identity import Split

__all__ = ["RolloutCommand", "RolloutRequest", "StageCommands"]


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """The rollouts to make: `n` of each task."""

    run_id: str
    tasks: str
    """The task file; `-`: standard input."""
    round: int
    split: Split
    n: int


class StageCommands:
    """Runs the commands of stages beside the services of a run, which are kept alive; each has a log in the run's folder."""

    def __init__(self, services: Services, folder: RunFolder) -> None:
        self._services = services
        self._folder = folder
        self._commands = Commands()

    def stop(self) -> None:
        """Ends the commands in progress, and lets none start until `resume`."""
        self._commands.stop()

    def resume(self) -> None:
        self._commands.resume()

    def run(
        self,
        name: str,
        arguments: list[str],
        target: Sequence[str],
        on_event: Callable[[Event], None],
        admitted: Sequence[int] = (0,),
        write: Callable[[IO[str]], None] | None = None,
    ) -> tuple[int, str]:
        """Runs a command; returns its exit code, one of `admitted`, and its last message. Raises ProcessError."""
        services = self._services
        services.keep_alive()
        log = self._folder.logs / f"{name}.log"
        whole = [name, *arguments, *services.config, "--format", "json", *target]
        code, message = self._commands.run(whole, services.environ, log, on_event, write)
        message = message.removeprefix("trainspan: ")
        if code not in admitted:
            raise ProcessError(f"{name} failed: {message} (log: {log})")
        return code, message


class RolloutCommand:
    """The command with the run's agent, judge and services."""

    def __init__(self, settings: Settings, services: Services, folder: RunFolder, commands: StageCommands) -> None:
        self._settings = settings
        self._services = services
        self._folder = folder
        self._commands = commands

    def run(
        self,
        request: RolloutRequest,
        on_progress: Callable[[Progress], None],
        write: Callable[[IO[str]], None] | None = None,
    ) -> RunResult:
        """Makes the rollouts and returns the result, once the collector has every verdict; `write` writes the tasks of standard input.

        Raises ProcessError.
        """
        results: list[RunResult] = []

        def on_event(event: Event) -> None:
            if isinstance(event, RunResult):
                results.append(event)
            elif isinstance(event, Progress):
                on_progress(event)

        arguments, agent = self._arguments(request)
        # A validation begins anew: the hard probe after it has a ledger of the same name.
        may_resume = write is None and request.split == "train"
        is_begun = may_resume and recorded_agent(request.run_id, request.round, "train") is not None
        resumed = ["--resume"] if is_begun else []
        # Exit code 1 with a result: no rollout is ok, which fails the round but not the loop. The round goes on without
        # rollouts that could be repeated.
        _, message = self._commands.run(
            "rollout", [*arguments, *resumed], agent, on_event, admitted=(0, 1, UNFINISHED), write=write
        )
        if not results:
            raise ProcessError(f"rollout failed: {message} (log: {self._folder.logs / 'rollout.log'})")
        if results[0].unacknowledged:  # the collector was down: it is restarted and receives the verdicts
            self.send_waiting(request)
        return replace(results[0], unacknowledged=0)

    def send_waiting(self, request: RolloutRequest) -> None:
        """Sends the verdicts that a runner with this request left in its ledger. Raises ProcessError if some are left."""
        events: list[Event] = []
        arguments, agent = self._arguments(request)
        again = [*arguments, "--resume"]
        code, message = self._commands.run("rollout", again, agent, events.append, admitted=(0, 1, UNFINISHED))
        results = [event for event in events if isinstance(event, RunResult)]
        if left := results[0].unacknowledged if results else message if code else 0:
            raise ProcessError(
                f"the collector has not acknowledged all verdicts: {left} (log: {self._folder.logs / 'rollout.log'})"
            )

    def _arguments(self, request: RolloutRequest) -> tuple[list[str], list[str]]:
        """The command's options, and its target."""
        settings, services = self._settings.rollouts, self._services
        arguments = ["--tasks", request.tasks, "--n", str(request.n), "--split", request.split]
        arguments += ["--round", str(request.round), "--run", request.run_id, "--policy-url", services.agents_url]
        arguments += [*services.collector_option(), *(["--judge", settings.judge] if settings.judge else [])]
        target = self._settings.loop.target
        target = self._settings.loop.val_target if target is None else target
        assert target is not None, "checked when tasks were opened"
        return arguments, [target] if is_function_name(target) else ["--", *shlex.split(target)]
