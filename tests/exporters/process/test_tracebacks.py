"""The agent's tracebacks are those of the run without tracing, and its threads belong to its rollout."""

import re
from pathlib import Path

import pytest

from tests.support.agents.programs import WITHOUT_OPENAI, run, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.telemetry import keys

NOWHERE = "http://127.0.0.1:9/v1/chat/completions"
IN_THREADS = """
    import asyncio, multiprocessing.pool, threading, traceback
    from concurrent.futures import ThreadPoolExecutor

    def fail(text):
        raise ValueError(text)

    class Worker(threading.Thread):
        def run(self):
            fail("a subclass")

    for thread in (threading.Thread(target=fail, args=["a thread"]), threading.Timer(.01, fail, ["a timer"]), Worker()):
        thread.start()
        thread.join()
        try:
            thread.start()
        except RuntimeError:
            traceback.print_exc()

    pool = ThreadPoolExecutor(1)
    try:
        pool.submit(fail, "a pool").result(10)
    except ValueError:
        traceback.print_exc()
    pool.shutdown()
    try:
        pool.submit(fail, "no pool")
    except RuntimeError:
        traceback.print_exc()
    pool = multiprocessing.pool.ThreadPool(1)
    for work in (lambda: pool.apply(fail, ["a pool"]), lambda: pool.map(fail, "xy"), lambda: list(pool.imap(fail, "x", 0))):
        try:
            work()
        except ValueError:
            traceback.print_exc()
    pool.terminate()
    asyncio.run(asyncio.to_thread(fail, "asyncio"))
"""
IN_CLIENTS = f"""
    import asyncio, os, traceback, urllib.request
    import aiohttp, httpx, requests, urllib3

    async def post(session):
        async with session as client:
            await client.post("{NOWHERE}")

    for ask in (
        lambda: httpx.post("{NOWHERE}"),
        lambda: requests.post("{NOWHERE}"),
        lambda: urllib3.PoolManager().request("POST", "{NOWHERE}", retries=False),
        lambda: urllib.request.urlopen("{NOWHERE}"),
        lambda: asyncio.run(post(httpx.AsyncClient())),
        lambda: asyncio.run(post(aiohttp.ClientSession())),
        lambda: os.execv("/no/such/program", ["x"]),
        lambda: os.execlp("no-such-program", "x"),
    ):
        try:
            ask()
        except Exception:
            traceback.print_exc()
    import openai
    openai.OpenAI(max_retries=0).models.list()
"""


@pytest.mark.parametrize("source", [IN_THREADS, IN_CLIENTS], ids=["threads", "clients"])
def test_a_traceback_has_the_frames_of_the_bare_run(tmp_path: Path, wired: dict[str, str], source: str) -> None:
    program = write(tmp_path, source)
    environ = wired | WITHOUT_OPENAI | {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    bare, traced = run(program, environ, instrument=False), run(program, environ)
    assert bare.stderr.count("Traceback") >= 6
    assert traced.code == bare.code == 1
    assert _frames(traced.stderr) == _frames(bare.stderr)


def _frames(stderr: str) -> list[str]:
    """The lines without addresses; a result may be there already, or be waited for."""
    text = re.sub(r"0x[0-9a-f]+", "0x", stderr)
    return re.sub(r'(_base.py", line )\d+, in result', r"\1#, in result", text).splitlines()


def test_threads_and_pools_belong_to_the_span_that_started_them(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    """The program's own context variables stay where they would be without tracing."""
    source = """
        import contextvars, threading
        from concurrent.futures import ThreadPoolExecutor
        from opentelemetry import trace

        tracer = trace.get_tracer("agent")
        own = contextvars.ContextVar("own", default="nothing")

        def work(name):
            with tracer.start_as_current_span(name):
                return own.get()

        class Worker(threading.Thread):
            def run(self):
                self.saw = work("subclass")

        pool = ThreadPoolExecutor(1, initializer=lambda: own.set("the worker's"))
        pool.submit(lambda: None).result()
        own.set("the caller's")
        with tracer.start_as_current_span("outer"):
            worker = Worker()
            worker.start()
            threading.Timer(.01, work, ["timer"]).start()
            in_pool = pool.submit(work, "pool").result()
        worker.join()
        print(worker.saw, in_pool, sorted(vars(worker)) == sorted({**vars(Worker()), "saw": ""}), sep=", ")
    """
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stdout, ran.stderr) == (0, "nothing, the worker's, True\n", "")
    outer = recorder.one("outer")
    assert {recorder.one(name).parent_span_id for name in ("subclass", "timer", "pool")} == {outer.span_id}
    assert outer.parent_span_id == recorder.one(keys.ROLLOUT_SPAN_NAME).span_id
