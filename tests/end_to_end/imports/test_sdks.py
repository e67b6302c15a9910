"""One agent, traced by trainspan and by the SDKs of others: what they recorded gives the same training files, byte for byte.

Phoenix is a real server. Nothing asks Langfuse or traceloop: their SDKs send to a server here, and pages of Langfuse's API are made
after its schema of what its SDK sent.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.imports.backends import LangfuseExport, PhoenixServer
from tests.end_to_end.imports.conftest import Environments, Recorded, write_json, write_otlp
from tests.end_to_end.imports.tasks import ALIKE, APART
from tests.support.agents.openai_server import OpenAIServer

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(1800)]

Files = dict[str, bytes]
"""Kind of training file → its content."""

LOST = {
    "native": {"names of messages", "strict"},
    "traceloop": {"names of messages", "strict"},
    "at_once": set(),
    "openinference": set(),
    "phoenix": set(),
    "langfuse": {"thoughts", "finish reasons"},
}
"""SDK → what it does not record: in docs/import.md."""


@pytest.fixture(scope="module", params=["alike", "apart"])
def recorded(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    environments: Environments,
    policy: OpenAIServer,
) -> Recorded:
    tasks = {"alike": ALIKE, "apart": APART}[request.param]
    return Recorded(tmp_path_factory.mktemp(request.param) / "run", tasks, environments, policy)


def test_native_files_have_each_task(recorded: Recorded) -> None:
    files = recorded.native()
    if recorded.tasks is ALIKE:
        rows = [json.loads(line) for line in files["sft"].splitlines()]
        prompts = {json.dumps(row["prompt"][:2]) for row in rows}
        assert (len(rows), len(prompts)) == (12, 8)  # the cut off answer and the refusal are no examples
        assert [len(row["tools"]) for row in rows] == [12] * 12
        assert len(files["dpo"].splitlines()) == 8
    _check(recorded, "native", files)


def test_all_sdks_at_once_in_one_process_give_the_native_files(recorded: Recorded) -> None:
    _check(recorded, "at_once", recorded.native("at_once"))


@pytest.mark.parametrize("sdk", ["openinference", "traceloop"])
def test_what_an_sdk_sends_gives_the_native_files(recorded: Recorded, sdk: str) -> None:
    files = write_otlp(recorded.folder(sdk), recorded.bodies(sdk))
    _check(recorded, sdk, recorded.imported(sdk, files))


def test_what_langfuse_sends_and_exports_gives_the_native_files(recorded: Recorded) -> None:
    bodies = recorded.bodies("langfuse")
    export, folder = LangfuseExport(bodies), recorded.folder("langfuse")
    scores = write_json(folder, "scores", [export.scores()])
    _check(recorded, "langfuse", recorded.imported("langfuse-sent", [*write_otlp(folder, bodies), *scores]))
    pages = [path for kind, page in export.pages().items() for path in write_json(folder, kind, [page])]
    _check(recorded, "langfuse", recorded.imported("langfuse-exported", pages))


@pytest.fixture
def phoenix_pages(recorded: Recorded, phoenix: PhoenixServer) -> Iterator[list[dict[str, Any]]]:
    """Pages of the spans in Phoenix, whose roots are annotated with the scores."""
    recorded.run("phoenix", phoenix.url, PHOENIX_PROJECT_NAME="agent")
    pages = phoenix.spans(len(recorded.scores))
    roots = {
        span["context"]["span_id"]: recorded.scores[span["context"]["trace_id"]]
        for page in pages
        for span in page["data"]
        if not span["parent_id"]
    }
    phoenix.annotate("span", roots)
    yield pages
    phoenix.delete()


def test_what_phoenix_has_stored_gives_the_native_files(
    recorded: Recorded, phoenix: PhoenixServer, phoenix_pages: list[dict[str, Any]]
) -> None:
    rest = recorded.folder("phoenix-rest")
    for number, page in enumerate(phoenix_pages):
        ids = [span["context"]["span_id"] for span in page["data"]]
        write_json(rest, f"annotations-{number}", phoenix.annotations("span", ids))
    write_json(rest, "spans", phoenix_pages)
    _check(recorded, "phoenix", recorded.imported("phoenix-rest", [rest]))

    frames = recorded.folder("phoenix-frames")
    recorded.frames(phoenix, frames)
    _check(recorded, "phoenix", recorded.imported("phoenix-frames", [frames]))

    otlp = recorded.folder("phoenix-otlp")
    write_json(otlp, "spans", phoenix.otlp_spans())
    phoenix.annotate("trace", recorded.scores)
    write_json(otlp, "annotations", phoenix.annotations("trace", list(recorded.scores)))
    _check(recorded, "phoenix", recorded.imported("phoenix-otlp", [otlp]))


def _check(recorded: Recorded, sdk: str, files: Files) -> None:
    """The native files, byte for byte; of what some SDKs lose, what neither of both loses."""
    native = recorded.native()
    if recorded.tasks is ALIKE:
        assert files == native
        return
    for kind, content in files.items():
        rows, native_rows = ([json.loads(line) for line in each.splitlines()] for each in (content, native[kind]))
        assert _fields_of(rows) == _FIELDS - LOST[sdk]
        assert [_reduced(row) for row in rows if not _is_cut_off(row)] == list(map(_reduced, native_rows))


_FIELDS = {"names of messages", "strict", "thoughts", "finish reasons"}


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [message for side in ("prompt", "completion", "chosen", "rejected") for message in row.get(side, ())]


def _is_cut_off(row: dict[str, Any]) -> bool:
    return any(message["content"] == "cut off here" for message in _messages(row))


def _fields_of(rows: list[dict[str, Any]]) -> set[str]:
    """Which of _FIELDS were recorded."""
    messages = [message for row in rows for message in _messages(row)]
    shown = {
        "names of messages": any("name" in message for message in messages),
        "strict": all("strict" in tool["function"] for row in rows for tool in row["tools"]),
        "thoughts": any("reasoning_content" in message for message in messages),
        "finish reasons": not any(map(_is_cut_off, rows)),
    }
    return {field for field, is_shown in shown.items() if is_shown}


def _reduced(row: dict[str, Any]) -> str:
    """The row without _FIELDS, as text."""
    for message in _messages(row):
        message.pop("name", None)
        message.pop("reasoning_content", None)
    for tool in row["tools"]:
        tool["function"].pop("strict", None)
    return json.dumps(row)
