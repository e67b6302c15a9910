"""The processes that train one model together, started by `accelerate launch` or `torchrun`; usually just one.

The leader (rank 0) owns files, ledger, metrics and the policy server; its findings, decisions and errors are shared
with the others, so that all stay in step. An error in a single process ends all: see `failures`.
"""

import gc
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from trainspan_schemas.errors import TrainingError
from trainspan_training.devices.failures import Failures, failed_in

__all__ = ["Team"]

_TIMEOUT = timedelta(days=30)
"""How long a process may wait for the next dataset."""
_GPU_BACKENDS = "cpu:gloo,cuda:nccl"
"""Objects go through gloo: a process that waits for one in NCCL would keep its GPU busy."""

_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed is not supported; FSDP splits weights too (fsdp_version: 2)",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM is not supported; FSDP splits weights too (fsdp_version: 2)",
}
_REFUSED_WITH_FSDP = {
    "FSDP_OFFLOAD_PARAMS": "offloading weights is not supported; leave fsdp_offload_params out",
    "FSDP_ACTIVATION_CHECKPOINTING": "leave fsdp_activation_checkpointing out, and set model.gradient_checkpointing",
}
"""Variables that `accelerate launch` sets, and why they are refused if true."""

_T = TypeVar("_T")
_Errors = type[Exception] | tuple[type[Exception], ...]


class Team:
    """This process among `size`."""

    def __init__(self, rank: int = 0, size: int = 1, *, splits: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.splits = splits
        """Whether each process holds only a part of weights, gradients and Adam's state (FSDP)."""
        self._failures: Failures | None = None

    @classmethod
    def join(cls) -> "Team":
        """Joins the team given by the environment (RANK, WORLD_SIZE); imports torch only if it has several processes.

        Raises TrainingError for an unsupported way of splitting weights over processes.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        splits = _splits(size)
        if size > 1:
            import torch
            from accelerate import PartialState

            cuda = torch.cuda.is_available()
            PartialState(cpu=not cuda, timeout=_TIMEOUT, backend=_GPU_BACKENDS if cuda else None)
        team = cls(int(os.environ.get("RANK", "0")), size, splits=splits)
        if size > 1:
            team._failures = Failures(team.rank, size)
        return team

    def fail(self, error: Exception) -> Exception:
        """Reports this process's final error; returns the one for every process to raise, the team's first."""
        return self._failures.first(error) if self._failures else error

    def finish(self) -> None:
        """Waits until all are done, after which none of them can fail."""
        self.gather(None)
        if self._failures:
            self._failures.close()
            self.gather(None)

    def leave(self) -> None:
        """Closes the connection to the others: a process that exits with it open may be aborted by its threads."""
        if self.size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                gc.collect()  # a trainer's reference cycle holds the connection
                dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, make: Callable[[], _T]) -> _T:
        """Returns the leader's result, or raises its exception, in every process."""
        if self.size == 1:
            return make()
        box: list[Any] = [None, None]
        if self.leads:
            try:
                box[0] = make()
            except Exception as error:  # noqa: BLE001  # raised again below, in all processes
                box[1] = error
        self._broadcast(box)
        if box[1] is not None:
            raise failed_in(0, box[1])
        return box[0]  # type: ignore[no-any-return]

    def each(self, items: Callable[[], Iterator[_T]]) -> Iterator[_T]:
        """The leader's items, one by one, in every process."""
        if self.size == 1:
            yield from items()
            return
        iterator = items() if self.leads else iter(())
        while (item := self.share(lambda: next(iterator, None))) is not None:
            yield item

    def every(self, make: Callable[[], _T], expected: _Errors = Exception) -> list[_T]:
        """Returns the results of all processes in each; if one fails, its exception is raised in every process."""
        return self.gather(self.all_or_none(make, expected))

    def all_or_none(self, make: Callable[[], _T], expected: _Errors = Exception) -> _T:
        """Returns this process's result; if one process fails, its exception is raised in every process.

        If `make` runs collective operations, `expected` are the exceptions that it raises only after all of them. Any
        other exception is raised in this process alone: the next collective would meet one of another kind, which
        aborts gloo.
        """
        outcome: Any = None
        error: Exception | None = None
        try:
            outcome = make()
        except expected as failure:  # raised again below, in all processes
            error = failure
        for rank, failed in enumerate(self.gather(error)):
            if failed is not None:
                raise failed_in(rank, failed)
        return outcome  # type: ignore[no-any-return]

    def gather(self, values: Any) -> list[Any]:
        """Gathers the value of every process in each of them."""
        if self.size == 1:
            return [values]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, values)
        return gathered

    @staticmethod
    def _broadcast(box: list[Any]) -> None:
        import torch.distributed as dist

        dist.broadcast_object_list(box, src=0)


def _splits(size: int) -> bool:
    """Whether accelerate will split the weights, according to the variables that it reads."""
    _refuse(_REFUSED)
    if not _is_set("ACCELERATE_USE_FSDP"):
        return False
    _refuse(_REFUSED_WITH_FSDP)
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise TrainingError(f"FSDP_VERSION is {version}: set fsdp_version: 2 in accelerate's configuration")
    if size == 1:
        raise TrainingError("ACCELERATE_USE_FSDP is set, but one process has nothing to split: start several")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # each process reads the model and keeps its part
    return True


def _refuse(reasons: dict[str, str]) -> None:
    for name, reason in reasons.items():
        if _is_set(name):
            raise TrainingError(f"{name} is set: {reason}")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")
