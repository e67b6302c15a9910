"""What is done to vLLM's engine: pausing it, loading weights and adapters into it, putting it to sleep."""

import asyncio
import itertools
import logging
from pathlib import Path
from typing import Any

from trainspan_schemas.errors import one_line
from trainspan_serving.checkpoints.candidates import Limits
from trainspan_serving.checkpoints.served_policy import Adapter, Policy

__all__ = ["Engine"]

_log = logging.getLogger(__name__)


class Engine:
    """Control over the engine client of one vLLM server."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._adapter_ids = itertools.count(1)

    @property
    def limits(self) -> Limits:
        """What a checkpoint must keep within."""
        model, lora = self._client.model_config, self._client.vllm_config.lora_config
        modules = lora.target_modules if lora else None
        return Limits(
            vocab_size=int(model.get_vocab_size()),
            max_tokens=int(model.max_model_len),
            max_lora_rank=int(lora.max_lora_rank) if lora else None,
            lora_modules=tuple(modules) if modules else None,
        )

    @property
    def dtype(self) -> str:
        """The weights', e.g. "float32"."""
        return str(self._client.model_config.dtype).removeprefix("torch.")

    @property
    def can_reload(self) -> bool:
        """Whether the workers have our extension, without which full weights cannot be exchanged."""
        return bool(self._client.vllm_config.parallel_config.worker_extension_cls)

    async def label(self, version: int) -> None:
        """Names the full weights; the engine reports the name with every generation."""
        await self._client.update_weight_version(str(version))

    async def pause(self, limit_s: float) -> bool:
        """Waits until nothing runs, and lets nothing begin; False after `limit_s`: then only the latter holds."""
        try:
            await asyncio.wait_for(self._client.pause_generation(mode="wait"), limit_s)
        except TimeoutError:
            return False
        return True

    async def abort(self) -> None:
        """Ends what runs, and lets nothing begin."""
        await self._client.pause_generation(mode="abort")

    async def resume(self) -> None:
        """Lets generation go on."""
        await self._client.resume_generation()

    async def load(self, policy: Policy) -> None:
        """Loads full weights into the paused engine, which goes on afterwards. Raises what vLLM raises."""
        await self._client.collective_rpc("trainspan_reload", args=(str(policy.weights),))
        await self._forget_prefixes()
        await self.label(policy.version)
        await self.resume()

    async def compare(self, folder: Path, seed: int) -> dict[str, list[str]] | None:
        """Which tensors of a folder the engine computes with; see `proof.compare`. None if that cannot be told.

        It cannot where the model is split over several workers, and without our worker extension.
        """
        return await self._ask_worker("trainspan_compare", str(folder), seed)

    async def compare_adapter(self, adapter: Adapter) -> dict[str, list[str]] | None:
        """The same of an adapter that has answered a request; see `proof.compare_adapter`."""
        return await self._ask_worker("trainspan_compare_adapter", str(adapter.folder), adapter.request.lora_int_id)

    async def _ask_worker(self, what: str, *arguments: Any) -> dict[str, list[str]] | None:
        parallel = self._client.vllm_config.parallel_config
        if not self.can_reload or parallel.world_size > 1:
            return None
        try:
            (verdicts,) = await self._client.collective_rpc(what, args=arguments)
        except Exception as error:  # noqa: BLE001  # vLLM's inner layout may be another one: log-probabilities then decide
            _log.warning("weights cannot be read out: %s", one_line(error))
            return None
        return dict(verdicts)

    async def add_adapter(self, folder: Path, version: int, name: str) -> Adapter:
        """Loads an adapter beside those that are there. Raises what vLLM raises.

        Each gets a number and a name of its own, by which vLLM keeps adapters and cached prefixes apart: the same
        folder loaded twice is two adapters, so that nothing of its earlier content is used.
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
        """Frees the accelerator's memory of the paused engine; weights are kept in main memory."""
        await self._client.sleep(level=1, mode="wait")

    async def wake(self) -> None:
        """Takes the memory back; generation goes on."""
        await self._client.wake_up()
        await self._forget_prefixes()

    async def _forget_prefixes(self) -> None:
        if not await self._client.reset_prefix_cache():
            raise RuntimeError("the prefix cache, computed by the earlier weights, could not be emptied")
