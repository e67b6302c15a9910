"""Threads, processes and programs that outlast a block, or begin in one: each call belongs to the block that asked for it."""

from pathlib import Path

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, execute, run, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.telemetry import keys

ASK = """
    import contextlib, json, multiprocessing, os, sys, threading, urllib.request
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


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.ci)])
def test_tasks_of_a_process_pool_belong_to_the_block_that_submits_them(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str], method: str
) -> None:
    """The pools start their processes in the first block."""
    source = f"""{ASK}
    from concurrent.futures import ProcessPoolExecutor

    def fail(text):
        ask(text)
        raise KeyError(text)

    if __name__ == "__main__":
        of = multiprocessing.get_context("{method}")
        pool = executor = None
        for task in ("A", "B", ""):
            with trainspan.rollout(task_id=task) if task else contextlib.nullcontext():
                pool = pool or of.Pool(1)
                executor = executor or ProcessPoolExecutor(1, mp_context=of)
                pool.map(ask, [f"{{task}} map"])
                pool.apply(ask, [f"{{task}} apply"])
                pool.starmap(ask_both, [(f"{{task}} one", f"{{task}} two")])
                list(pool.imap(ask, [f"{{task}} imap"]))
                list(pool.imap_unordered(ask, [f"{{task}} unordered"], 2))
                assert list(executor.map(ask, [f"{{task}} executor"])) == [f"{{task}} executor"]
                error = executor.submit(fail, f"{{task}} failed").exception()
                assert isinstance(error, KeyError)
                assert "_child_processes" not in str(error.__cause__), error.__cause__
        executor.shutdown()
        pool.close()
        pool.join()
    """
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stderr) == (0, "")
    asked = tasks_asked(policy)
    assert len(asked) == 3 * 8
    assert asked == {text: text[0].strip() or None for text in asked}
    rollouts = {span.attributes.get(keys.TASK_ID): span for span in recorder.named(keys.ROLLOUT_SPAN_NAME)}
    parts = recorder.named("trainspan.process")
    for task in ("A", "B", None):
        own = [span for span in parts if span.attributes.get(keys.TASK_ID) == task]
        assert sum(span.attributes[keys.ROLLOUT_CALLS] for span in own) == 8
        assert {span.attributes[keys.ROLLOUT_ID] for span in own} == {rollouts[task].attributes[keys.ROLLOUT_ID]}
        assert {span.trace_id for span in own} == {rollouts[task].trace_id}


def test_programs_and_children_that_begin_in_a_block_belong_to_it(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = f"""{ASK}
    import asyncio, subprocess

    def program(text):
        return [sys.executable, __file__, text]

    async def from_asyncio(text):
        await (await asyncio.create_subprocess_exec(*program(text))).wait()

    if __name__ == "__main__":
        if len(sys.argv) > 1:
            ask(sys.argv[1])
            sys.exit()
        subprocess.run(program("- before"), check=True)
        before = dict(os.environ)
        with trainspan.rollout(task_id="A"):
            subprocess.run(program("A inherits"), check=True)
            given = {{**os.environ, "MORE": "1"}}
            subprocess.run(program("A is given"), env=given, check=True)
            assert given == {{**os.environ, "MORE": "1"}}
            own = {{"TRACEPARENT": f"00-{{'a' * 32}}-{{'b' * 16}}-01", "BAGGAGE": "trainspan.rollout.id=r,trainspan.task.id=own"}}
            subprocess.run(program("own"), env={{**os.environ, **own}}, check=True)
            asyncio.run(from_asyncio("A asyncio"))
            for method in ("fork", "spawn", "forkserver"):
                child = multiprocessing.get_context(method).Process(target=ask, args=(f"A {{method}}",))
                child.start()
                child.join()
                assert child.exitcode == 0
            try:
                subprocess.run(["no-such-program"])
            except FileNotFoundError as error:
                assert "trainspan" not in str(error.__traceback__.tb_next.tb_frame.f_code)
        assert dict(os.environ) == before
        subprocess.run(program("- after"), check=True)
    """
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stderr) == (0, "")
    assert tasks_asked(policy) == {
        "- before": None,
        "- after": None,
        "own": "own",
        **dict.fromkeys(
            ("A inherits", "A is given", "A asyncio", "A fork", "A spawn", "A forkserver"),
            "A",
        ),
    }
    of_block = [span for span in recorder.named("trainspan.process") if span.attributes.get(keys.TASK_ID) == "A"]
    assert sum(span.attributes[keys.ROLLOUT_CALLS] for span in of_block) == 6


QUEUES = f"""{ASK}
    import asyncio, contextlib, queue

    separately = len(sys.argv) > 1
    jobs = queue.Queue()

    def block(text):
        return trainspan.rollout(task_id=f"{{text[0]}} itself") if separately else contextlib.nullcontext()

    def work():
        while text := jobs.get():
            with block(text):
                ask(text)
            jobs.task_done()

    async def work_async(jobs):
        while True:
            text, done = await jobs.get()
            with block(text):
                await asyncio.to_thread(ask, text)
            done.set_result(None)

    async def main():
        jobs, worker = asyncio.Queue(), None
        for task in "CD":
            async with trainspan.rollout(task_id=task):
                worker = worker or asyncio.create_task(work_async(jobs))
                done = asyncio.get_running_loop().create_future()
                jobs.put_nowait((f"{{task}} asked", done))
                await done

    for task in "AB":
        with trainspan.rollout(task_id=task):
            if task == "A":
                threading.Thread(target=work, daemon=True).start()
            jobs.put(f"{{task}} asked")
            jobs.join()
    asyncio.run(main())
"""


def test_calls_of_a_thread_or_task_after_the_rollout_in_which_it_began_are_named_once(
    tmp_path: Path, policy: OpenAIServer, wired: dict[str, str]
) -> None:
    ran = run(write(tmp_path, QUEUES), wired | WITHOUT_OPENAI)
    assert ran.code == 0
    (line,) = ran.stderr.splitlines()
    assert "event=call_after_rollout; a thread or task goes on after the rollout in which it began" in line
    assert tasks_asked(policy) == {"A asked": "A", "B asked": "A", "C asked": "C", "D asked": "C"}


def test_a_block_in_a_thread_that_has_outlasted_its_rollout_is_a_rollout_of_its_own(
    tmp_path: Path, policy: OpenAIServer, wired: dict[str, str]
) -> None:
    write(tmp_path, QUEUES)
    ran = execute(["opentelemetry-instrument", "python", "agent.py", "separately"], tmp_path, wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stderr) == (0, "")
    assert tasks_asked(policy) == {"A asked": "A", "B asked": "B itself", "C asked": "C", "D asked": "D itself"}


def test_calls_and_rewards_of_a_test_are_its_own_though_one_task_runs_all_tests(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    """The task, which begins in the first test, runs those of a fixture of the whole session."""
    source = f"""{ASK}
    import asyncio, pytest

    pytestmark = pytest.mark.anyio

    @pytest.fixture(scope="session")
    def anyio_backend():
        return "asyncio"

    @pytest.fixture(scope="session")
    async def base():
        yield

    @pytest.mark.parametrize("text", ["one", "two", "three"])
    async def test_asks(base, text):
        ask(f"[{{text}}]")
        await asyncio.gather(asyncio.to_thread(ask, f"[{{text}}] in a thread"))
        trainspan.reward(1.0)
        assert text != "two"
    """
    write(tmp_path, source, "test_agent.py")
    command = ["opentelemetry-instrument", "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = execute(command, tmp_path, wired | WITHOUT_OPENAI | {"TRAINSPAN_BOUNDARY": "test"})
    assert (ran.code, ran.stderr) == (1, "")
    assert "1 failed, 2 passed" in ran.stdout
    asked = tasks_asked(policy)
    assert len(asked) == 6
    for text, task in asked.items():
        assert task == f"test_agent.py::test_asks{text.removesuffix(' in a thread')}"
    rollouts = {span.attributes[keys.TASK_ID]: span for span in recorder.named(keys.ROLLOUT_SPAN_NAME)}
    assert {
        (span.attributes[keys.ROLLOUT_CALLS], len(span.events)) for span in rollouts.values() if not span.error
    } == {(2, 1)}
    assert [task for task, span in rollouts.items() if span.error] == ["test_agent.py::test_asks[two]"]
    traces = {request.baggage[keys.TASK_ID]: request.traceparent.trace_id for request in policy.requests}
    assert traces == {task: span.trace_id for task, span in rollouts.items()}
