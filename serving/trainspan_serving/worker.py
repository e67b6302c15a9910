"""The extension inside vLLM's workers: reloads every weight and compares it with the checkpoint."""

import logging
from pathlib import Path
from typing import Any

from trainspan_serving.capture.seeds import rewind_cpu_generators
from trainspan_serving.checkpoints.cpu_adapters import apply_adapters_by_slot
from trainspan_serving.checkpoints.merged import MergedWeights
from trainspan_serving.swap.proof import compare, compare_adapter

__all__ = ["PolicyWorker"]

rewind_cpu_generators()
apply_adapters_by_slot()


def _is_news(record: logging.LogRecord) -> bool:
    """Drops vLLM's warning about each rotary embedding at every reload: they are computed, never loaded."""
    subject = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not str(subject).endswith("RotaryEmbedding")


class PolicyWorker:
    """A worker extension (`--worker-extension-cls`): vLLM adds its methods to the worker for `collective_rpc`."""

    def trainspan_reload(self: Any, folder: str, adapter: str | None = None) -> None:
        """Loads the safetensors of a folder in place, with an adapter merged into them if one is given.

        On a CPU, vLLM multiplies by a packed copy of each matrix. `reload_weights` repacks linear layers but not the
        output head, which would keep the old weights if embeddings are tied, so it is repacked here.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_is_news)
        if adapter is None:
            self.reload_weights(weights_path=folder)
        else:
            self.reload_weights(weights_iterator=MergedWeights(Path(folder), Path(adapter)).tensors())
        for module in self.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(module)

    def trainspan_compare(self: Any, folder: str, adapter: str | None, seed: int) -> dict[str, list[str]]:
        """Reports which tensors of a folder this worker computes with; see `proof.compare`."""
        weights = MergedWeights(Path(folder), Path(adapter) if adapter else None)
        return compare(self.model_runner.get_model(), weights, seed)

    def trainspan_compare_adapter(self: Any, folder: str, number: int) -> dict[str, list[str]]:
        """Does the same for an adapter's folder; see `proof.compare_adapter`."""
        return compare_adapter(self.model_runner.lora_manager._adapter_manager, number, Path(folder))
