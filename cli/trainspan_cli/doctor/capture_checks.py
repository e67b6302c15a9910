"""Checks of a store's capture for `trainspan doctor`."""

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainspan_cli.doctor.finding import Finding
from trainspan_cli.doctor.imported import FROM_FILES
from trainspan_loop.clients.store import backlog, rows
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import TrainspanError, pip_install
from trainspan_schemas.store.access import running_collector
from trainspan_schemas.telemetry import keys

__all__ = ["backlog_findings", "capture_findings", "rollout_findings", "stored_findings"]

_BACKLOG_ALARM_S = 60.0
_STRAY_CLIENTS = f"""
    SELECT DISTINCT regexp_extract(s.attributes, '"{keys.USER_AGENT}":"([^"]*)"', 1) AS client
    FROM calls c JOIN spans s USING (trace_id, span_id)
    WHERE c.rollout_id IS NULL AND s.attributes NOT LIKE '%"{keys.CALL_INTERNAL}"%' ORDER BY 1 LIMIT 4"""


def stored_findings(store: str, settings: Settings) -> list[Finding]:
    """Findings on loading, capture and the newest rollouts of a store (a path or a grpc:// address)."""
    path = Path(store)
    if store.startswith(("grpc://", "grpc+tls://")) or path.exists() or running_collector(path):
        try:
            return [*backlog_findings(store), *capture_findings(store), *rollout_findings(store, settings)]
        except TrainspanError as error:
            return [Finding("problem", "store", str(error))]
        except ModuleNotFoundError as error:
            advice = f"{pip_install('collector')} here, or run the command on the collector's machine"
            return [Finding("note", "store", f"{store} cannot be read without {error.name}", advice)]
    advice = "start `trainspan collector`, then run an agent under `opentelemetry-instrument`"
    return [Finding("note", "store", f"nothing stored yet at {store}", advice)]


def backlog_findings(store: str) -> list[Finding]:
    """Whether acknowledged data is loaded about as fast as it arrives."""
    n_bytes, seconds = backlog(store)
    if not n_bytes or (seconds is not None and seconds < _BACKLOG_ALARM_S):
        return [Finding("ok", "loading", "keeps up with ingest")]
    duration = "nothing was loaded yet" if seconds is None else f"loading them takes {seconds:.0f} s"
    detail = f"{n_bytes / 2**20:.0f} MiB of acknowledged requests are not loaded: {duration}"
    advice = (
        "send data more slowly, or give the collector a faster disk or CPU; it slows senders before its disk is full"
    )
    return [Finding("problem", "loading", detail, advice)]


@dataclass(frozen=True, slots=True)
class _CaptureCheck:
    """A count over the store that ought to be 0; `{n}` in its detail is the count, `{strays}` in its advice who made stray calls."""

    subject: str
    sql: str
    detail: str
    advice: str


_CLIENT_CALL: Final = """(attributes LIKE '%"gen_ai.response.id"%' AND kind = 3)"""
_CAPTURE_CHECKS: Final = (
    _CaptureCheck(
        "calls",
        "SELECT count(*) FROM calls WHERE logprobs IS NULL OR len(logprobs) <> len(completion_ids)",
        "{n} without log-probabilities",
        "serve the policy with `trainspan serve`, which records them",
    ),
    _CaptureCheck(
        "identity",
        "SELECT count(*) FROM calls c JOIN spans s USING (trace_id, span_id) WHERE c.rollout_id IS NULL "
        """AND s.attributes NOT LIKE '%"trainspan.call.internal"%'""",
        "{n} calls belong to no rollout",
        "run the agent under `opentelemetry-instrument`, or give it the base URL …/rollout/{{traceparent}}/v1{strays}",
    ),
    _CaptureCheck(
        "calls made elsewhere",
        f"SELECT count(*) FROM spans s WHERE {_CLIENT_CALL} AND NOT EXISTS "
        f"(SELECT 1 FROM calls c WHERE c.trace_id = s.trace_id) AND s.trace_id NOT IN (SELECT trace_id FROM ({FROM_FILES}))",
        "{n} model calls of agents went to another server",
        "set OPENAI_BASE_URL of the agent to the policy server",
    ),
    _CaptureCheck(
        "imported",
        f"SELECT count(*) FROM ({FROM_FILES})",
        "{n} rollouts came from files of other tools",
        "trainspan doctor --imported counts what they can teach",
    ),
    _CaptureCheck(
        "calls unknown",
        "SELECT count(*) FROM rollouts r WHERE r.n_calls > 0 "
        "AND NOT EXISTS (SELECT 1 FROM calls c WHERE c.trace_id = r.trace_id) "
        """AND NOT EXISTS (SELECT 1 FROM spans s WHERE s.trace_id = r.trace_id """
        """AND (s.attributes LIKE '%"gen_ai.request.model"%' OR s.attributes LIKE '%"llm.model_name"%'))""",
        "{n} rollouts made model calls that nothing recorded",
        "set OPENAI_BASE_URL of the agent to the policy server; for conversations with a vendor's model, "
        f"{pip_install('messages')} in the agent's environment",
    ),
    _CaptureCheck(
        "token ids",
        f"""SELECT count(*) FROM spans WHERE attributes LIKE '%"{keys.CALL_LACKS}"%'""",
        "{n} calls came from a server that returns no token ids or log-probabilities; they cannot be trained",
        "serve the policy with `trainspan serve`, or with a server that supports `return_token_ids` (vLLM)",
    ),
    _CaptureCheck(
        "boundary",
        f"""SELECT count(*) FROM spans WHERE attributes LIKE '%"{keys.NO_BOUNDARY}"%'""",
        "{n} calls of a web agent belong to no single request",
        f"{pip_install('web')} in the agent's environment, or put each task into `with trainspan.rollout():`",
    ),
    _CaptureCheck(
        "rewards",
        "SELECT count(*) FROM rollouts WHERE status = 'ok' AND reward IS NULL",
        "{n} finished rollouts have no reward",
        "report one with trainspan.reward(…), or pass --judge to rollout or --reward to dataset",
    ),
    _CaptureCheck(
        "failures",
        "SELECT count(*) FROM rollouts WHERE status <> 'ok'",
        "{n} rollouts failed; they are not trained on",
        'see: trainspan sql "SELECT status, count(*) FROM rollouts GROUP BY 1"',
    ),
)


def capture_findings(store: str) -> list[Finding]:
    """Captured and missing data over the whole store."""

    def count(sql: str) -> int:
        return int(next(iter(rows(store, sql)[0].values())) or 0)

    clients = [str(row["client"]) for row in rows(store, _STRAY_CLIENTS) if row["client"]]
    strays = f"; they were made by {', '.join(map(repr, clients))}" if clients else ""
    calls, rollouts = count("SELECT count(*) FROM calls"), count("SELECT count(*) FROM rollouts")
    findings = [Finding("ok", "store", f"{calls} calls of {rollouts} rollouts")]
    for check in _CAPTURE_CHECKS:
        if n := count(check.sql):
            detail, advice = check.detail.format(n=n), check.advice.format(strays=strays)
            findings.append(Finding("note", check.subject, detail, advice))
    return findings


def rollout_findings(store: str, settings: Settings) -> list[Finding]:
    """Unfinished rollouts among the newest, and calls that were constrained or do not merge, with an example of each."""
    if importlib.util.find_spec("polars") is None:
        return []
    from trainspan_processing.explain.checkup import check_rollouts
    from trainspan_processing.read.source import Source
    from trainspan_processing.text.token_text import find_decoder
    from trainspan_processing.text.tokenizer_places import tokenizer_places
    from trainspan_processing.traces.trace_index import Clock

    decoder = find_decoder(tokenizer_places(None, settings))
    clock = Clock(time.time_ns, time.sleep)
    with Source([store], allow_behind=True) as source:
        troubles = check_rollouts(source, decoder, clock, settings.dataset.settle_s)
    return [Finding("note", trouble.subject, trouble.detail, trouble.advice) for trouble in troubles]
