"""Seeded requests on a CPU whose prompts vLLM reads in several parts.

vLLM samples after each part, throws all but the last sample away, and sets the request's generator back by its offset. A
generator of the CPU has no offset: PyTorch raises, and the engine ends with every request in it. Here it goes back to
its seed instead, which is where it was before the prompt's first part.
"""

from typing import Any

import torch
import wrapt

__all__ = ["SeededGenerator", "rewind_cpu_generators"]


class SeededGenerator(torch.Generator):
    """A CPU generator of one request, which can go back to its seed while `output_token_ids` of the request is empty.

    A request that was preempted after its first tokens goes on from where its generator is: its later tokens then differ
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
        """Undoes the draws for a part of the prompt."""
        if not self._output_token_ids:
            self.set_state(self._begin)
        return self


def rewind_cpu_generators() -> None:
    """Gives each seeded request of a CPU such a generator, from when vLLM's module of requests is imported."""
    wrapt.register_post_import_hook(_wrap, "vllm.v1.worker.gpu_input_batch")


def _wrap(module: Any) -> None:
    def post_init(wrapped: Any, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        generator = request.generator
        if generator is not None and generator.device.type == "cpu" and not isinstance(generator, SeededGenerator):
            request.generator = SeededGenerator(generator, request.output_token_ids)

    wrapt.wrap_function_wrapper(module.CachedRequestState, "__post_init__", post_init)
