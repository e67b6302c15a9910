"""Functions as users would pass them to --reward, --credit and --baseline."""

import asyncio
import time

import numpy as np
import polars as pl

from trainspan_processing.stored_rollout import StoredRollout


def length(rollout: StoredRollout) -> float:
    return float(sum(len(call.completion_ids) for call in rollout.calls))


def seen(rollout: StoredRollout) -> dict[str, float] | None:
    """0 if the rollout differs from what the test sent, None for the task "skip"."""
    if rollout.task_id == "skip":
        return None
    call = rollout.calls[0]
    as_sent = (
        call.text == "four",
        call.messages == [{"role": "user", "content": "2+2?"}],
        call.attributes["gen_ai.request.model"] == "policy",
        rollout.attributes["trainspan.rollout.boundary"] == "runner",
        [(item.name, item.score, item.source) for item in rollout.evaluations] == [("reward", 0.5, "agent")],
    )
    return {"reward": float(all(as_sent)) * (2.0 if rollout.task_id == "double" else 1.0), "other": 9.0}


def huge_on_b(rollout: StoredRollout) -> float:
    return 1e160 if rollout.rollout_id.endswith("b") else length(rollout)


def fails_on_b(rollout: StoredRollout) -> float:
    if rollout.rollout_id.endswith("b"):
        raise KeyError("no answer")
    return float("nan") if rollout.rollout_id.endswith("c") else 1.0


async def length_last_first(rollout: StoredRollout) -> float:
    """Like `length`, but finishes sooner for later names."""
    await asyncio.sleep(0.05 * (ord("f") - ord(rollout.rollout_id[-1])))
    return length(rollout)


def of_each_call(rollout: StoredRollout) -> list[float | None]:
    """The tokens of each answer; a first call has no reward."""
    return [float(len(call.completion_ids)) if call.index else None for call in rollout.calls]


def of_calls_and_rollout(rollout: StoredRollout) -> dict[str, list[float | None] | float]:
    return {"reward": of_each_call(rollout), "style": 0.5}


def hangs_on_b(rollout: StoredRollout) -> float:
    if rollout.rollout_id.endswith("b"):
        time.sleep(60)
    return length(rollout)


def last_call_only(calls: pl.DataFrame, gamma: float) -> pl.DataFrame:
    last = pl.col("position") == pl.col("position").max().over("rollout")
    return calls.with_columns(pl.when(last).then("rollout_reward").otherwise(0.0).alias("return"))


def doubled(items: pl.DataFrame) -> pl.DataFrame:
    none = pl.lit(None, dtype=pl.String)
    return items.filter(~pl.col("history")).with_columns(
        pl.lit(0.0).alias("center"), pl.lit(2.0).alias("scale"), none.alias("drop")
    )


def forgets(items: pl.DataFrame) -> pl.DataFrame:
    return doubled(items).head(1)


def partial(rollout: StoredRollout) -> float | None:
    """Half a point for an agent that timed out, None for one that crashed, an error for one with a failed judge."""
    if rollout.status == "judge_error":
        raise ValueError("no answer")
    return {"ok": 1.0, "timeout": 0.5}.get(rollout.status, None if rollout.status == "agent_error" else 9.0)


async def wants_two(rollout: StoredRollout, task: str) -> float:
    return length(rollout) + len(task)


async def asynchronous(rollout: StoredRollout) -> bool:
    return bool(rollout.calls)


def returns(rollout: StoredRollout) -> object:
    """A return value of the kind named by the rollout's task."""

    async def later() -> object:
        return {"reward": "bad"}

    if rollout.task_id == "coroutine":
        return later()
    return {
        "text": "0.5",
        "nan": float("nan"),
        "list": [1.0, 2.0],
        "other": {"score": 1.0},
        "numpy": np.float32(0.5),
        "none": None,
    }[rollout.task_id or ""]


def no_frame(items: pl.DataFrame) -> list[float]:
    return [0.0] * items.height


def crashes(calls: pl.DataFrame, gamma: float) -> pl.DataFrame:
    raise KeyError(gamma)


def counted(rollout: StoredRollout) -> dict[str, float | None]:
    """The length, and a line in the file `calls.txt` of the working directory for each call; None and an error are answers, too."""
    with open("calls.txt", "a", encoding="utf-8") as file:
        file.write(f"{rollout.rollout_id}\n")
    if rollout.rollout_id.endswith("fails"):
        raise KeyError("no answer")
    return {"reward": length(rollout), "style": None}


def knows_everything(rollout: StoredRollout) -> float:
    """1 if the answer, the tools and the decoded texts are as the test sent them."""
    call = rollout.calls[0]
    tools = [(tool.name, tool.arguments, tool.result, tool.failed) for tool in rollout.tools]
    return float(
        rollout.answer == {"sum": 4}
        and tools == [("add", '{"x": 2}', "4", False), ("tell", None, None, False)]
        and (call.messages, call.prompt_text, call.text) == ([], "2+2?", "four")
    )


def always_fails(rollout: StoredRollout) -> float:
    raise KeyError("no such column")
