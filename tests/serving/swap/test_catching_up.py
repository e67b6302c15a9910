"""A server that was away: what it swaps to by itself, when it gives way to the trainer, and what it says if it cannot."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.policy_server import Offer
from trainspan_serving.checkpoints.copying import CopyingError
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.checkpoints.source import CopyFailedError
from trainspan_serving.swap import catching_up
from trainspan_serving.swap.catching_up import CatchingUp
from trainspan_serving.swap.policy_server import BusyError
from trainspan_serving.swap.policy_table import PolicyTable

FIRST, SECOND = (Offer(f"policy-{number:06d}", number, f"{number}a" * 32) for number in (1, 2))


@dataclass
class Source:
    """What is accepted under the URL, or why it cannot be read."""

    last: Offer | Exception | None

    def accepted(self, _: str | None) -> Offer | None:
        if isinstance(self.last, Exception):
            raise self.last
        return self.last


class Server:
    """The parts of a policy server that catching up uses; swaps only change the table."""

    def __init__(self, accepted: Offer | Exception | None, trouble: Sequence[Exception] = ()) -> None:
        self.source = Source(accepted)
        self.trouble = list(trouble)
        """Raised by the next requests to stage, one each."""
        self.swapped: list[str] = []
        self.behind: str | None = None
        self.is_ready = True
        self.policies = PolicyTable(ServedPolicy("policy", 0, Path("base")), {}, {})

    @property
    def policy(self) -> ServedPolicy:
        return self.policies.base.policy

    async def stage(self, *_: Any, yields_to_others: bool) -> None:
        assert yields_to_others
        if self.trouble:
            raise self.trouble.pop(0)

    async def swap(self, name: str, version: int, _: str | None, sha256: str, *, instead_of: ServedPolicy) -> None:
        if self.policy is not instead_of:
            raise BusyError("swapped meanwhile")
        self.swapped.append(name)
        self.serve(version, sha256)

    def serve(self, version: int, sha256: str | None) -> None:
        self.policies.base.policy = replace(self.policy, version=version, weights_sha256=sha256)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(catching_up, name, 0.01)
    monkeypatch.setattr(catching_up, "_BEFORE_LISTENING_S", 0.2)


def before_listening(server: Server) -> CatchingUp:
    one = CatchingUp(server)  # type: ignore[arg-type]
    asyncio.run(one.before_listening())
    return one


def follow(one: CatchingUp, until: Callable[[], bool]) -> bool:
    """Goes on in the background until then; returns whether it goes on by itself after that."""

    async def run() -> bool:
        task = asyncio.create_task(one.after_listening())
        async with asyncio.timeout(10):
            while not until():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)
        is_going_on = not task.done()
        task.cancel()
        return is_going_on

    return asyncio.run(run())


def test_a_copy_is_waited_for_and_troubles_that_pass_are_tried_again() -> None:
    server = Server(FIRST, trouble=[CopyingError("it", 1), CopyFailedError("no answer"), CopyingError("it", 2)])
    before_listening(server)
    assert (server.swapped, server.behind, server.is_ready) == ([FIRST.checkpoint], None, True)


def test_what_is_served_already_is_not_swapped_but_another_runs_of_the_same_number_is() -> None:
    server = Server(FIRST)
    server.serve(1, FIRST.weights_sha256)
    before_listening(server)
    assert server.swapped == []
    server.serve(1, "of another run")
    before_listening(server)
    assert server.swapped == [FIRST.checkpoint]


def test_without_the_trainers_machine_it_listens_says_so_and_goes_on_until_it_is_there() -> None:
    server = Server(CopyFailedError("no answer from there"))
    one = before_listening(server)
    assert server.behind == "policy policy is not caught up: no answer from there"
    assert server.is_ready, "nobody knows a newer one"
    server.source.last = FIRST
    assert follow(one, lambda: server.behind is None)
    assert server.swapped == [FIRST.checkpoint]


def test_a_server_that_knows_of_an_accepted_checkpoint_without_serving_it_is_not_ready() -> None:
    server = Server(FIRST, trouble=[CopyFailedError("no room")] * 99)
    one = before_listening(server)
    assert (server.behind, server.is_ready) == ("policy policy is not caught up: no room", False)
    server.source.last = CopyFailedError("no answer from there")
    follow(one, lambda: "no answer" in str(server.behind))
    assert not server.is_ready
    server.source.last = FIRST
    server.trouble.clear()
    follow(one, lambda: server.behind is None)
    assert (server.swapped, server.is_ready) == ([FIRST.checkpoint], True)


def test_a_checkpoint_that_this_server_cannot_serve_is_tried_once_and_a_later_one_again() -> None:
    server = Server(FIRST, trouble=[CheckpointError("it does not fit")])
    one = before_listening(server)
    assert (server.swapped, server.is_ready) == ([], False)
    server.source.last = SECOND
    follow(one, lambda: server.behind is None)
    assert server.swapped == [SECOND.checkpoint]


def test_once_the_trainer_swaps_everything_is_left_to_it() -> None:
    server = Server(FIRST)
    one = before_listening(server)
    server.serve(2, SECOND.weights_sha256)  # by the trainer, which has not noted it as accepted yet
    assert not follow(one, lambda: True)
    assert server.swapped == [FIRST.checkpoint], "and not again"
