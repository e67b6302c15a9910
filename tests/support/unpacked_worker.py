"""A worker extension with a planted fault: it reloads weights as plain vLLM does, without packing the output head anew."""

from typing import Any


class UnpackedWorker:
    def trainspan_reload(self: Any, weights_path: str) -> None:
        self.reload_weights(weights_path=weights_path)
