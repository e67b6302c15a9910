"""Threads, processes and programs that outlast a block, or begin in one: each call belongs to the block that asked for it."""

from pathlib import Path

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, run, write
from trainspan_schemas.telemetry import keys

ASK = """
    import json, multiprocessing, os, sys, threading, urllib.request
    import trainspan

    def ask(text):
        url, body = os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": [{"role": "user", "content": text}]}
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})).read()
        return text

    def ask_both(one, two):
        ask(one), ask(two)
"""


def tasks_asked(policy: OpenAIServer) -> dict[str, str | None]:
    """Prompt → task of its request's rollout."""
    return {request.body["messages"][0]["content"]: request.baggage.get(keys.TASK_ID) for request in policy.requests}


def test_tasks_of_a_thread_pool_of_multiprocessing_belong_to_the_block_that_submits_them(
    tmp_path: Path, policy: OpenAIServer, wired: dict[str, str]
) -> None:
    source = f"""{ASK}
    import multiprocessing.pool

    before = multiprocessing.pool.ThreadPool(1)
    for task in "AB":
        with trainspan.rollout(task_id=task):
            if task == "A":
                within = multiprocessing.pool.ThreadPool(1)
            for name, pool in ("before", before), ("within", within):
                pool.map(ask, [f"{{task}} map {{name}}"])
                pool.apply(func=ask, args=[f"{{task}} apply {{name}}"])
                pool.starmap(ask_both, [(f"{{task}} one {{name}}", f"{{task}} two {{name}}")])
                list(pool.imap(ask, [f"{{task}} imap {{name}}"]))
                list(pool.imap_unordered(ask, [f"{{task}} unordered {{name}}"], 2))
    """
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stderr) == (0, "")
    asked = tasks_asked(policy)
    assert len(asked) == 24
    assert asked == {text: text[0] for text in asked}
