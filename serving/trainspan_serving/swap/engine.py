"""Controls vLLM's engine: pauses it, loads weights and adapters, puts it to sleep."""

import asyncio
import itertools
import logging
import sys
from pathlib import Path
from typing import Any

from trainspan_schemas.errors import one_line
from trainspan_serving.checkpoints.adapters import SERVED_MODULES
from trainspan_serving.checkpoints.candidates import EngineLimits
from trainspan_serving.checkpoints.served_policy import Adapter, ServedPolicy

__all__ = ["Engine"]

_log = logging.getLogger(__name__)


class Engine:
    """Controls the engine client of one vLLM server."""

    def __init__(self, client: Any, *, merges_adapters: bool) -> None:
        self._client = client
        self.merges_adapters = merges_adapters
        """Whether a LoRA adapter is added to the full weights instead of being computed next to them."""
        self._adapter_ids = itertools.count(1)
        self.asleep = False

    @property
    def limits(self) -> EngineLimits:
        """The limits for a checkpoint."""
        model, lora = self._client.model_config, self._client.vllm_config.lora_config
        modules = lora.target_modules if lora else None
        return EngineLimits(
            vocab_size=int(model.get_vocab_size()),
            max_tokens=int(model.max_model_len),
            max_lora_rank=sys.maxsize if self.merges_adapters else int(lora.max_lora_rank) if lora else None,
            lora_modules=SERVED_MODULES if self.merges_adapters else tuple(modules) if modules else None,
            merges_adapters=self.merges_adapters,
            can_reload=self.can_reload,
        )

    @property
    def cache_block_tokens(self) -> int:
        """Length of a block of the prefix cache, which holds whole blocks."""
        return int(self._client.vllm_config.cache_config.block_size)

    @property
    def dtype(self) -> str:
        """The dtype of the weights, e.g. "float32"."""
        return str(self._client.model_config.dtype).removeprefix("torch.")

    @property
    def can_reload(self) -> bool:
        """Whether the workers have our extension, which a swap of full weights needs."""
        return bool(self._client.vllm_config.parallel_config.worker_extension_cls)

    async def label(self, version: int) -> None:
        """Names the full weights; the engine reports the name with every generation."""
        await self._client.update_weight_version(str(version))

    async def pause(self, limit_s: float) -> bool:
        """Blocks new generations and waits until none is running; False if some still run after `limit_s`."""
        try:
            await asyncio.wait_for(self._client.pause_generation(mode="wait"), limit_s)
        except TimeoutError:
            return False
        return True

    async def freeze(self, limit_s: float) -> None:
        """Stops running generations after their current token until `resume`, and forgets what was computed for them.

        When they go on, the engine computes their keys and values again, with the weights that it then has: the next token is
        exactly one of these weights, given all tokens so far. Raises TimeoutError, and resumes, if that takes over `limit_s`.
        """
        try:
            await asyncio.wait_for(self._client.pause_generation(mode="keep", clear_cache=True), limit_s)
        except TimeoutError:
            await self.resume()
            raise

    async def abort(self) -> None:
        """Aborts running generations and blocks new ones."""
        await self._client.pause_generation(mode="abort")

    async def resume(self) -> None:
        """Resumes generation."""
        await self._client.resume_generation()

    async def load(self, policy: ServedPolicy) -> None:
        """Loads full weights into the paused engine, which stays paused. Raises what vLLM raises."""
        adapter = str(policy.merged) if policy.merged else None
        await self._client.collective_rpc("trainspan_reload", args=(str(policy.weights), adapter))
        await self._forget_prefixes()
        await self.label(policy.version)

    async def compare(self, policy: ServedPolicy) -> dict[str, list[str]] | None:
        """Returns which tensors of the full weights the engine computes with (see `proof.compare`); None if unknown.

        It is unknown if the model is split over several workers, or without our worker extension.
        """
        adapter = str(policy.merged) if policy.merged else None
        return await self._ask_worker("trainspan_compare", str(policy.weights), adapter, policy.version)

    async def compare_adapter(self, adapter: Adapter) -> dict[str, list[str]] | None:
        """Does the same for an adapter that has answered a request; see `proof.compare_adapter`."""
        return await self._ask_worker("trainspan_compare_adapter", str(adapter.folder), adapter.request.lora_int_id)

    async def _ask_worker(self, what: str, *arguments: Any) -> dict[str, list[str]] | None:
        parallel = self._client.vllm_config.parallel_config
        if not self.can_reload or parallel.world_size > 1:
            return None
        try:
            (verdicts,) = await self._client.collective_rpc(what, args=arguments)
        except Exception as error:  # noqa: BLE001  # vLLM's internals may differ: log-probabilities then decide
            _log.warning("cannot read the weights: %s", one_line(error))
            return None
        return dict(verdicts)

    async def add_adapter(self, folder: Path, version: int, name: str) -> Adapter:
        """Loads an adapter next to the loaded ones. Raises what vLLM raises.

        Each gets a unique number and name, by which vLLM separates adapters and cached prefixes: loading the same
        folder twice makes two adapters, so that nothing of its earlier content is used.
        """
        from vllm.lora.request import LoRARequest

        number = next(self._adapter_ids)
        request = LoRARequest(f"{name}@{version}.{number}", number, str(folder))
        if not await self._client.add_lora(request):
            raise RuntimeError(f"vLLM did not load the adapter {folder.name}")
        return Adapter(folder, request)

    async def remove_adapter(self, adapter: Adapter) -> None:
        await self._client.remove_lora(adapter.request.lora_int_id)

    async def sleep(self) -> None:
        """Frees the accelerator memory of the paused engine; the weights stay in main memory."""
        await self._client.sleep(level=1, mode="wait")
        self.asleep = True

    async def wake(self) -> None:
        """Allocates the memory again and resumes generation; does nothing if the engine is awake."""
        if self.asleep:
            await self._client.wake_up()
            await self._forget_prefixes()
            self.asleep = False

    async def _forget_prefixes(self) -> None:
        if not await self._client.reset_prefix_cache():
            raise RuntimeError("could not clear the prefix cache, which the earlier weights computed")
