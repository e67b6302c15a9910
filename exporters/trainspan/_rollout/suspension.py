"""Keeps a block to the code inside it: `enter` makes it current, `leave` ends that.

OpenTelemetry's current context belongs to a thread or task, and a generator has none of its own: what it attaches stays
attached in the code that advances it, between its steps and, if it ends elsewhere, for ever. Python tells nobody when a
generator is suspended. So a block remembers the frame of the generator that entered it, and whoever asks for the
current context gets the one of the innermost such frame on the call stack. This switches contexts at the next question,
in both directions: `inside` is the generator's, `outside` that of the code around it. A program without such blocks is
not watched.

A generator that is a context manager, a fixture or a hook wrapper is different: its block is for the code that entered
the manager.
"""

import asyncio
import contextlib
import contextvars
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import Token
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from opcode import opname
from types import FrameType, ModuleType
from typing import Any, Final, cast

import wrapt
from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

from trainspan._guard import Args, Kwargs, guarded
from trainspan._rollout.last_call import note, noted
from trainspan._rollout.scope import Scope, scope_in, with_scope

__all__ = [
    "Block",
    "came_at_a_yield",
    "enter",
    "enter_test",
    "has_outlived_its_rollout",
    "is_between_steps",
    "leave",
    "separate_flow",
    "switch_carried",
]

_BLOCK: Final = context.create_key("trainspan-block")
_GENERATOR: Final = CO_GENERATOR | CO_ASYNC_GENERATOR

_MANAGERS: Final[dict[str, tuple[str, ...]]] = {
    "contextlib": (),
    "pluggy._callers": (),
    "pluggy._execution": (),
    "_pytest.fixtures": (),
    "pytest_asyncio.plugin": (),
    "anyio._backends._asyncio": ("_run_tests_and_fixtures",),
}
"""Module → its functions (all, if none is named) that advance a generator once to enter it and once to leave it."""

_SPAWNING: Final = {"asyncio": "to_thread", "anyio.to_thread": "run_sync"}
"""Module → function that copies the current context without asking OpenTelemetry for it."""


class Block:
    """A block that was entered: `with trainspan.rollout(...)`, whether it began the rollout or joined it."""

    def __init__(self, frame: FrameType | None) -> None:
        self.frame = frame
        """The generator that entered it, while that is unfinished. The reference keeps alive neither it nor its variables."""
        self.live = True
        self.outside = self.inside = Context()
        self.flows: weakref.WeakSet[Any] = weakref.WeakSet()
        """The tasks and threads in whose context it was attached."""
        self.token: Token[Context] | None = None
        self.noted_outside = self.noted_inside = noted()
        """The calls that came back last (last_call.py): of generators that are advanced in turn, each has its own."""


class _Watched:
    frames: Final[dict[int, list[Block]]] = {}
    """Id of a generator's frame → its live blocks."""
    leaked: Final[set["weakref.ref[Block]"]] = set()
    """Ended blocks that may still be in somebody's context."""
    loops: Final["weakref.WeakSet[Any]"] = weakref.WeakSet()
    tests: Final["weakref.WeakSet[Scope]"] = weakref.WeakSet()
    """Rollouts of tests, which run one after another."""
    test: Scope | None = None
    """The latest one."""
    runtime: Any = None
    """OpenTelemetry's own holder of the current context, once it is watched."""


def enter(scope: Scope, span: Span) -> Block:
    """Makes `scope` and `span` current for the code inside the block."""
    block = Block(_generator_around(sys._getframe(1)))
    block.outside = context.get_current()
    block.inside = trace.set_span_in_context(span, with_scope(scope, context.set_value(_BLOCK, block)))
    block.flows.add(_flow())
    block.token = context.attach(block.inside)
    if block.frame is not None:
        _Watched.frames.setdefault(id(block.frame), []).append(block)
        _watch()
    return block


def enter_test(test: Scope) -> Token[Context]:
    """Makes a test's rollout current, also where that of an ended test is, as in a task that runs all tests."""
    _Watched.tests.add(test)
    _Watched.test = test
    _watch()
    return context.attach(test.enter())


def leave(block: Block) -> None:
    """Makes current again what is outside the block; it may be called in any task or thread."""
    current = context.get_current()
    block.live = False
    frame = _forget_frame(block)
    if frame is not None:
        note(block.noted_outside)
    restored = frame is None and _reset(block.token)
    if not restored:
        _Watched.leaked.add(weakref.ref(block, _Watched.leaked.discard))
        _watch()
        if block in _enclosing_blocks(current):
            context.attach(block.outside)
    block.token, block.inside = None, Context()  # which refers to the block
    while (left := _block_in(context.get_current())) is not None and not left.live and _is_here(left):
        context.attach(left.outside)


def is_between_steps() -> bool:
    """Whether a generator with a block, advanced by this code or its callers, waits for its next step."""
    inside = _on_stack() if _Watched.frames else ()
    waiting = (block for blocks in list(_Watched.frames.values()) for block in blocks if block not in inside)
    return any(_is_here(block) and not _has_finished(block) for block in list(waiting))


def has_outlived_its_rollout() -> bool:
    """Whether this code is in a block that joined a rollout which has ended."""
    ctx = context.get_current()
    block, scope = _block_in(ctx), scope_in(ctx)
    return block is not None and block.live and scope is not None and scope.ended


def came_at_a_yield(error: BaseException) -> bool:
    """Whether an error was thrown into a generator that waited for its next step, not raised by what it does."""
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None and not entry.tb_frame.f_code.co_flags & _GENERATOR:
        entry = entry.tb_next
    if entry is None or entry.tb_next is not None or not entry.tb_frame.f_code.co_flags & _GENERATOR:
        return False
    return 1 in (_resumed_as(entry.tb_frame, at) for at in (entry.tb_lasti, entry.tb_lasti + 2))


def _resumed_as(frame: FrameType, at: int) -> int:
    """What the frame resumes from at this instruction: 1 `yield`, 2 `yield from`, 3 `await`, 0 none of them."""
    code = frame.f_code.co_code
    return code[at + 1] & 3 if opname[code[at]] == "RESUME" else 0


def _block_in(ctx: Context) -> Block | None:
    return cast("Block | None", ctx.get(_BLOCK))


def _enclosing_blocks(ctx: Context) -> Iterator[Block]:
    """The blocks that `ctx` is in, the innermost first."""
    while (block := _block_in(ctx)) is not None:
        yield block
        ctx = block.outside


def _generator_around(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost generator among the callers in this task that is not a context manager.

    A coroutine that no task and no `await` advances, but a program's own scheduler, is such a generator, too.
    """
    task = _task()
    bottom = getattr(task.get_coro(), "cr_frame", None) if isinstance(task, asyncio.Task) else None
    may_be_sent = task is None or bottom is not None
    while frame is not None:
        kind, caller = frame.f_code.co_flags, frame.f_back
        if kind & _GENERATOR and not _is_manager(caller):
            return frame
        is_awaited = caller is not None and caller.f_code.co_flags & (_GENERATOR | CO_COROUTINE)
        if kind & CO_COROUTINE and may_be_sent and frame is not bottom and not is_awaited:
            return frame
        frame = caller if frame is not bottom else None
    return None


def _is_manager(caller: FrameType | None) -> bool:
    functions = _MANAGERS.get(str(caller.f_globals.get("__name__"))) if caller else None
    return caller is not None and functions is not None and (not functions or caller.f_code.co_name in functions)


def _task() -> Any:
    """Returns the running task of asyncio or trio, None outside."""
    trio = sys.modules.get("trio")
    for current in (asyncio.current_task, getattr(getattr(trio, "lowlevel", None), "current_task", None)):
        try:
            if current is not None and (task := current()) is not None:
                return task
        except RuntimeError:
            continue
    return None


@guarded
def switch_carried(function: Callable[..., Any]) -> None:
    """Switches the context in which `function` will run elsewhere, if it brings one: a `Context.run`, or a partial of it."""
    if _Watched.runtime is not None:
        _switch_within(getattr(getattr(function, "func", function), "__self__", None))


def _switch_within(copied: Any) -> None:
    """Switches a context that this code has copied from its own."""
    if isinstance(copied, contextvars.Context):
        with contextlib.suppress(RuntimeError):  # it is in use
            copied.run(context.get_current)


@contextlib.contextmanager
def separate_flow() -> Iterator[None]:
    """Marks the code inside as what its thread does for others, such as a task of a pool, in their context."""
    earlier = getattr(_thread, "flow", None)
    _thread.flow = _Flow()
    try:
        yield
    finally:
        _thread.flow = earlier


class _Flow:
    """One thing after another in a thread."""


_thread = threading.local()


def _flow() -> Any:
    """Returns whose context is current: a task's or a thread's."""
    return _task() or _thread_flow()


def _thread_flow() -> Any:
    return getattr(_thread, "flow", None) or threading.current_thread()


def _is_here(block: Block) -> bool:
    """Whether the block was attached in this task, or in this thread outside any task."""
    return _task() in block.flows or _thread_flow() in block.flows


def _on_stack() -> Sequence[Block]:
    """The live blocks of the generators that are running here, the innermost first."""
    blocks: list[Block] = []
    frames = _Watched.frames
    for top in _stacks():
        frame: FrameType | None = top
        while frame is not None:
            if id(frame) in frames:
                blocks += reversed(frames.get(id(frame), ()))
            frame = frame.f_back
    return blocks


def _stacks() -> Iterator[FrameType | None]:
    """The running code's stack, and those of the greenlets that wait for it, as SQLAlchemy's asynchronous sessions do."""
    yield sys._getframe(2)
    greenlet = sys.modules.get("greenlet")
    waiting = greenlet.getcurrent().parent if greenlet is not None else None
    while waiting is not None:
        yield waiting.gr_frame
        waiting = waiting.parent


def _has_finished(block: Block) -> bool:
    """Whether its generator has; then the block, which something else keeps open, is no longer the generator's."""
    if block.frame is not None and gc.get_referents(
        block.frame
    ):  # a frame that still has a generator refers to nothing
        _forget_frame(block)
    return block.frame is None


def _forget_frame(block: Block) -> FrameType | None:
    frame, block.frame = block.frame, None
    if frame is not None:
        blocks = _Watched.frames[id(frame)]
        blocks.remove(block)
        if not blocks:
            del _Watched.frames[id(frame)]
    return frame


def _is_left(block: Block, inside: Sequence[Block]) -> bool:
    """Whether this code is outside of a block in its context."""
    if block in inside:
        return False
    if not _is_here(block):
        return block.live and _is_callback() and _waits_at_a_yield(block)
    return not block.live or not (block.frame is None or _has_finished(block))


def _is_callback() -> bool:
    """Whether an event loop runs this code outside any task, in a context that asyncio copied when it was told to."""
    return asyncio._get_running_loop() is not None and _task() is None


def _waits_at_a_yield(block: Block) -> bool:
    """Whether its generator leaves it to the consumer what happens meanwhile, and when it goes on."""
    frame = block.frame
    if frame is None or _has_finished(block):
        return False
    at = frame.f_lasti
    return opname[frame.f_code.co_code[at]] == "YIELD_VALUE" and _resumed_as(frame, at + 2) in (1, 2)


def _right(raw: Context) -> Context:
    """Returns the context of the running code, if `raw` is the one that was last attached here."""
    inside = _on_stack() if _Watched.frames else ()
    ctx = raw
    while (block := _block_in(ctx)) is not None and _is_left(block, inside):
        if block.live:
            block.inside, block.noted_inside = ctx, noted()
            note(block.noted_outside)
        ctx = block.outside
    for block in reversed(inside):
        if block not in _enclosing_blocks(ctx):
            block.outside, ctx = ctx, block.inside
            block.noted_outside = noted()
            note(block.noted_inside)
            block.flows.add(_flow())
    return ctx


def _in_latest_test(ctx: Context) -> Context:
    scope, test = scope_in(ctx), _Watched.test
    if test is None or scope is None or scope is test or scope not in _Watched.tests or not scope.ended:
        return ctx
    return test.enter(ctx)


class _SwitchingContext:
    """OpenTelemetry's runtime context, asked through `_right` while there are blocks or tests to watch."""

    def attach(self, ctx: Context) -> Any:
        return _Watched.runtime.attach(ctx)

    def detach(self, token: Any) -> None:
        _Watched.runtime.detach(token)

    def get_current(self) -> Context:
        raw: Context = _Watched.runtime.get_current()
        if not _Watched.frames and not _Watched.leaked and _Watched.test is None:
            return raw
        ctx = _switched(raw)
        return raw if ctx is None else ctx


@guarded
def _switched(raw: Context) -> Context:
    ctx = _in_latest_test(_right(raw))
    if ctx is not raw:
        _Watched.runtime.attach(ctx)
    return ctx


def _reset(token: Token[Context] | None) -> bool:
    """Whether the context before `attach` is current again: not in another task or thread, where `detach` logs an error."""
    if not isinstance(token, Token):
        return False
    try:
        token.var.reset(token)
    except ValueError:
        return False
    return True


@guarded
def _watch() -> None:
    """Watches the current context from now on, and the tasks that the running loop starts: they copy it."""
    if _Watched.runtime is None:
        _Watched.runtime = context._RUNTIME_CONTEXT
        context._RUNTIME_CONTEXT = _SwitchingContext()  # type: ignore[assignment]
        for module, function in _SPAWNING.items():
            wrapt.register_post_import_hook(guarded(_spawner(function)), module)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if loop not in _Watched.loops:
        _Watched.loops.add(loop)
        loop.set_task_factory(_task_factory(loop.get_task_factory()))


def _spawner(function: str) -> Callable[[ModuleType], None]:
    def switch(wrapped: Callable[..., Any], _: Any, args: Args, kwargs: Kwargs) -> Any:
        context.get_current()
        return wrapped(*args, **kwargs)

    def watch(module: ModuleType) -> None:
        wrapt.wrap_function_wrapper(module, function, switch)

    return watch


def _task_factory(earlier: Any) -> Any:
    def create(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        context.get_current()
        _switch_within(options.get("context"))
        return asyncio.Task(coro, loop=loop, **options) if earlier is None else earlier(loop, coro, **options)

    return create
