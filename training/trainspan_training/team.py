"""The processes that train one model together, started by `accelerate launch` or `torchrun`; usually one alone.

The leader (rank 0) owns files, ledger, metrics and the policy server; what it finds or decides is shared with the others,
its errors too, so that all take the same turn.
"""

import gc
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from trainspan_schemas.errors import TrainingError

__all__ = ["Team"]

_TIMEOUT = timedelta(days=30)
"""A process may wait so long for the next dataset."""

_SPLITTING = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
"""What `accelerate launch` sets for each of these."""

_T = TypeVar("_T")


class Team:
    """This process among `size`."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def join(cls) -> "Team":
        """The team that the environment names (RANK, WORLD_SIZE); imports torch only where there are several processes.

        Raises TrainingError where accelerate is to split the weights over processes.
        """
        for name in _SPLITTING:
            if os.environ.get(name, "").lower() in ("1", "true"):
                raise TrainingError(
                    f"{name} is set: weights that are split over processes are not supported; let accelerate launch plain data "
                    'parallelism (MULTI_GPU or MULTI_CPU), and where the model is too large set train.adapter = "lora"'
                )
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1:
            import torch
            from accelerate import PartialState

            PartialState(cpu=not torch.cuda.is_available(), timeout=_TIMEOUT)
        return cls(int(os.environ.get("RANK", "0")), size)

    def leave(self) -> None:
        """Ends the connection to the others: a process that exits with it open may be aborted by its threads."""
        if self.size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                gc.collect()  # a trainer is a ring of references that holds the connection
                dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, make: Callable[[], _T]) -> _T:
        """What the leader makes, in every process; an exception of the leader's is raised in every process."""
        if self.size == 1:
            return make()
        box: list[Any] = [None, None]
        if self.leads:
            try:
                box[0] = make()
            except Exception as error:  # noqa: BLE001  # it is raised again below, here and elsewhere
                box[1] = error
        self._broadcast(box)
        if box[1] is not None:
            raise box[1]
        return box[0]  # type: ignore[no-any-return]

    def each(self, items: Callable[[], Iterator[_T]]) -> Iterator[_T]:
        """The leader's items, one by one, in every process."""
        if self.size == 1:
            yield from items()
            return
        iterator = items() if self.leads else iter(())
        while (item := self.share(lambda: next(iterator, None))) is not None:
            yield item

    def gather(self, values: Any) -> list[Any]:
        """The value of every process, in each of them."""
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
