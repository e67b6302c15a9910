"""Grammars are compiled in a process that ends with the client, or at a limit."""

import asyncio
import logging
import string
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from trainspan_serving.capture import grammar_trial
from trainspan_serving.capture.grammar_trial import GrammarText, GrammarTooSlowError, GrammarTrial

SMALL = GrammarText("regex", "(yes|no)", any_whitespace=True)
SLOW = GrammarText(
    "ebnf",
    "root ::= " + " | ".join(f'"answer number {number} of many"' for number in range(50_000)),
    any_whitespace=True,
)
"""More than a minute with a vocabulary of 96 tokens."""


def tokenizer() -> str:
    words = [*string.printable[:95], "</s>"]
    return str(xgrammar.TokenizerInfo(words, vocab_size=len(words), stop_token_ids=[95]).serialize_json())


def run(test: Callable[[GrammarTrial], Coroutine[Any, Any, None]]) -> None:
    async def with_trial() -> None:
        trial = GrammarTrial(tokenizer)
        await trial.check(SMALL)
        try:
            await test(trial)
        finally:
            await trial.close()

    asyncio.run(with_trial())


def workers() -> list[int]:
    """Processes of trials that this process has started and that have not ended."""
    children = Path("/proc/self/task").glob("*/children")
    pids = [int(pid) for each in children for pid in each.read_text().split()]
    return [pid for pid in pids if b"grammar_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.ci
def test_a_grammar_that_takes_too_long_is_refused_once_and_for_all_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammar_trial, "_LIMIT_S", 0.5)

    async def test(trial: GrammarTrial) -> None:
        for _ in range(2):
            with pytest.raises(
                GrammarTooSlowError, match=r"takes more than 0\.5 s or 2 GiB to compile: make it smaller"
            ):
                await trial.check(SLOW)
        assert workers() == []
        await trial.check(GrammarText("regex", "(on|off)", any_whitespace=True))
        assert len(workers()) == 1

    run(test)
    assert [r.levelno for r in caplog.records if r.name.startswith("trainspan")] == [logging.WARNING] * 2
    assert "grammar refused form=ebnf characters=" in caplog.text


def test_a_grammar_that_holds_up_the_event_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(trial: GrammarTrial) -> None:
        monkeypatch.setattr(grammar_trial, "_PARSE_LIMIT_S", -1.0)  # the clock is coarse
        with pytest.raises(GrammarTooSlowError, match="takes more than -1 s to read"):
            await trial.check(GrammarText("regex", "(on|off)", any_whitespace=True))

    run(test)


@pytest.mark.ci
def test_a_compilation_ends_with_its_client_also_while_the_process_starts() -> None:
    async def test(trial: GrammarTrial) -> None:
        for wait_s in (0.5, 0.0):
            asked = asyncio.create_task(trial.check(SLOW))
            await asyncio.sleep(wait_s)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        await asyncio.wait_for(trial.check(GrammarText("regex", "(on|off)", any_whitespace=True)), 60)
        assert len(workers()) == 1

    run(test)


@pytest.mark.ci
@pytest.mark.parametrize(
    "grammar",
    [
        GrammarText("regex", "(", any_whitespace=True),
        GrammarText("ebnf", "root ::= nothing", any_whitespace=True),
        GrammarText("json_schema", '{"type": "wrong"}', any_whitespace=False),
        GrammarText("structural_tag", "[", any_whitespace=True),
        GrammarText("lark", "start: \udcff", any_whitespace=True),
    ],
)
def test_an_error_in_a_grammar_is_left_to_vllm(grammar: GrammarText) -> None:
    async def test(trial: GrammarTrial) -> None:
        await trial.check(grammar)

    run(test)


@pytest.mark.ci
def test_a_known_grammar_is_not_compiled_again_and_waits_for_no_other() -> None:
    async def test(trial: GrammarTrial) -> None:
        slow = asyncio.create_task(trial.check(SLOW))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        await trial.check(SMALL)
        assert time.monotonic() - began < 0.1
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow

    run(test)


@pytest.mark.ci
def test_without_a_process_grammars_pass_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        trial = GrammarTrial(lambda: "no tokenizer")
        await trial.check(SMALL)
        await trial.check(SLOW)
        await trial.close()

    asyncio.run(test())
    assert "grammars are not tried" in caplog.text
