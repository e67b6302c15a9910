"""Keeps the exporting threads real under gevent.

`gevent.monkey.patch_all` replaces the locks of `threading` while the SDK's batch processors run in their own threads.
The event that wakes such a thread would then be part real and part gevent's, and programs would hang at exit. Here it
is replaced with one made of real locks, so that exports run alongside the greenlets without blocking them.
"""

import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import wrapt

from trainspan._guard import Args, Kwargs, guarded
from trainspan._process.providers import first_providers
from trainspan._releases import processors_of

__all__ = ["watch_gevent"]

_allocate_lock = threading.Lock  # the original, before gevent patches it


class ThreadEvent:
    """The part of `threading.Event` that a batch processor needs, for one waiting thread, made of real locks."""

    def __init__(self) -> None:
        self._set = False
        self._wake = _allocate_lock()
        self._wake.acquire()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Wakes the waiting thread."""
        self._set = True
        if self._wake.locked():
            try:
                self._wake.release()
            except RuntimeError:  # another thread was faster
                return

    def clear(self) -> None:
        _know_thread()
        self._set = False
        self._wake.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was set within `timeout` seconds."""
        if not self._set:
            self._wake.acquire(timeout=-1 if timeout is None else timeout)
        _know_thread()
        return self._set


class ThreadCondition(ThreadEvent):
    """The same for `threading.Condition`; the conditions waited for are the processor's own variables."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was notified within `timeout` seconds."""
        notified = super().wait(None if timeout is None else max(0.0, timeout))
        self.clear()
        return notified

    notify = notify_all = ThreadEvent.set


_WAKERS: Final = {"_worker_awaken": ThreadEvent, "condition": ThreadCondition, "_condition": ThreadCondition}
"""Attribute that wakes a processor's thread → replacement: an event, up to 1.33 a condition."""


@guarded
def _know_thread() -> None:
    """Registers the thread under `get_ident`, which the patch changed and which a thread looks up when it ends.

    Called after each wait and each export, because the patch may come during either.
    """
    active: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]
    if threading.get_ident() in active:
        return
    native = threading.get_native_id()
    for thread in list(active.values()):
        if thread.native_id == native:
            active[threading.get_ident()] = thread


def watch_gevent() -> None:
    """Wraps gevent's patches once they are imported."""
    wrapt.register_post_import_hook(guarded(_wrap), "gevent.monkey")


def _wrap(module: ModuleType) -> None:
    def patch_thread(wrapped: Callable[..., Any], _: Any, args: Args, kwargs: Kwargs) -> Any:
        _keep_workers()
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "patch_thread", patch_thread)


@guarded
def _keep_workers() -> None:
    """Moves the threads to the new wakers before the patch.

    A thread that began to wait on an old one during the patch would wait on gevent's lock, for which it needs a hub of
    its own; two threads that make their hubs at the same time block each other in gevent's imports.
    """
    for processor in _batch_processors():
        for name, waker in _WAKERS.items():
            old = getattr(processor, name, None)
            if not isinstance(old, ThreadEvent | None):
                setattr(processor, name, waker())
                _leave(old)


def _leave(old: Any) -> None:
    """Wakes the thread that waits on `old`; afterwards, none starts to wait on it."""
    if isinstance(old, threading.Event):
        old.set()
    else:
        with old:
            old.notify_all()


def _batch_processors() -> Iterator[Any]:
    for processor in (processor for provider in first_providers() for processor in processors_of(provider)):
        yield getattr(processor, "_batch_processor", processor)
