"""Fixes seeded requests on a CPU if vLLM prefills their prompt in several chunks.

vLLM samples after each chunk, discards all but the last sample, and rewinds the request's generator by its offset. A
CPU generator has no offset: PyTorch raises, and the engine dies with all its requests. Here the generator returns to
its seed instead, which was its state before the first chunk of the prompt.
"""

from typing import Any

import torch
import wrapt

__all__ = ["SeededGenerator", "rewind_cpu_generators"]


class SeededGenerator(torch.Generator):
    """A CPU generator of one request that can return to its seed while the request's `output_token_ids` is empty.

    A request that is preempted after its first tokens keeps the current state of its generator: its later tokens differ
    from those of a run without preemption.
    """

    def __new__(cls, generator: torch.Generator, output_token_ids: list[int]) -> "SeededGenerator":
        return super().__new__(cls, device="cpu")  # type: ignore[call-arg]

    def __init__(self, generator: torch.Generator, output_token_ids: list[int]) -> None:
        self.set_state(generator.get_state())
        self._begin = generator.get_state()
        self._output_token_ids = output_token_ids

    def get_offset(self) -> int:
        """Always 0."""
        return 0

    def set_offset(self, offset: int) -> "SeededGenerator":
        """Undoes the draws made for a chunk of the prompt."""
        if not self._output_token_ids:
            self.set_state(self._begin)
        return self


def rewind_cpu_generators() -> None:
    """Gives each seeded request on a CPU such a generator, once vLLM's request module is imported."""
    wrapt.register_post_import_hook(_wrap, "vllm.v1.worker.gpu_input_batch")


def _wrap(module: Any) -> None:
    def post_init(wrapped: Any, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        generator = request.generator
        if generator is not None and generator.device.type == "cpu" and not isinstance(generator, SeededGenerator):
            request.generator = SeededGenerator(generator, request.output_token_ids)

    wrapt.wrap_function_wrapper(module.CachedRequestState, "__post_init__", post_init)
