"""Rewards of a rubric whose judge model is wrong about a known share of what it is asked.

The judge is trainspan's own, with its requests, parsing and cache. The model is an HTTP server in this process: it compares the
answer with the reference, and gives the opposite score where a hash of both says so. So it always says the same about the same
answer to the same task, as a judge model at temperature 0 does.
"""

import asyncio
import json
import re
import tempfile
import threading
from collections.abc import Sequence
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from trainspan_rollouts.judges.choice import find_judge
from trainspan_rollouts.judges.judge import Judge, Result
from trainspan_schemas.telemetry.keys import REWARD

__all__ = ["RubricRewards", "is_wrong"]

_CONCURRENCY: Final = 8
_TIMEOUT_S: Final = 60.0
_RUBRIC: Final = """\
model = "{model}"
base_url = "http://127.0.0.1:{port}/v1"
sees = ["task", "reference", "answer"]

[[criteria]]
name = "correct"
question = "Is the answer the number of the reference?"
"""


class RubricRewards:
    """The rubric and its model; `judge_error` is the probability that a verdict is wrong, `seed` decides which ones are."""

    def __init__(self, judge_error: float, seed: int) -> None:
        self._server = _JudgeModel(judge_error, seed)
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / "rubric.toml"
        # The name keeps the cached answers of judges apart that listen at the same port, one after another.
        model = f"wrong-{judge_error:g}-seed-{seed}"
        file.write_text(_RUBRIC.format(model=model, port=self._server.server_address[1]))
        self._judge = find_judge(str(file), _TIMEOUT_S)

    def of(self, rollouts: Sequence[tuple[str, str, str | None]]) -> list[float]:
        """The rewards of rollouts, each (problem, reference, answer or None)."""
        return asyncio.run(self._all(rollouts))

    async def _all(self, rollouts: Sequence[tuple[str, str, str | None]]) -> list[float]:
        judge = Judge(self._judge, _CONCURRENCY, _TIMEOUT_S)
        try:
            verdicts = [
                judge.judge({"input": problem, "answer": reference}, _result(answer))
                for problem, reference, answer in rollouts
            ]
            return [verdict.scores[REWARD] for verdict in await asyncio.gather(*verdicts)]
        finally:
            judge.close()

    def close(self) -> None:
        """Ends the model's server."""
        self._server.shutdown()
        self._server.server_close()
        self._folder.cleanup()


def is_wrong(judge_error: float, seed: int, asked: str) -> bool:
    """Whether the judge model is wrong about this message: a draw that the message and the seed decide."""
    drawn = int.from_bytes(blake2b(f"{seed}\n{asked}".encode(errors="surrogatepass"), digest_size=8).digest())
    return drawn < judge_error * 2**64


def _result(answer: str | None) -> Result:
    return Result("ok", answer, "", None, 0.0, "")


class _JudgeModel(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, judge_error: float, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.judge_error, self.seed = judge_error, seed
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: _JudgeModel  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked = body["messages"][-1]["content"]
        is_right = _part("reference", asked) == _part("answer", asked)
        if is_wrong(self.server.judge_error, self.server.seed, asked):
            is_right = not is_right
        verdict = {"correct": {"reason": "the same number" if is_right else "another number", "score": 10 * is_right}}
        answer = {"choices": [{"message": {"content": json.dumps(verdict)}, "finish_reason": "stop"}]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def _part(name: str, asked: str) -> str | None:
    """The content between a part's tags."""
    match = re.search(rf"<({name}-[0-9a-f]{{8}})>\n(.*?)\n</\1>", asked, re.DOTALL)
    return match and match[2]
