"""The queue of calls in memory: order, batches, bounds, and the end."""

import threading
import time

from trainspan_serving.export.call_queue import CallQueue
from trainspan_serving.export.call_span import CallSpan


def call(number: int, size: int = 0) -> CallSpan:
    return CallSpan("ab" * 16, f"{number:016x}", None, "chat policy", 1, 2, {"ids": bytes(size)})


def test_a_batch_holds_the_oldest_calls_up_to_512_or_2_mib_and_stays_queued_until_it_is_removed() -> None:
    queue = CallQueue(2_000, 2**30)
    calls = [call(number) for number in range(600)]
    assert all(queue.put(one) for one in calls)
    assert queue.batch(None, 0.0) == queue.batch(None, 0.0) == calls[:512]
    queue.remove(calls[:512])
    assert queue.batch(None, 0.0) == calls[512:]
    queue.remove(calls[512:])
    large = [call(number, size) for number, size in enumerate((3 * 2**20, 2**20, 2**20))]
    for one in large:
        queue.put(one)
    assert queue.batch(None, 0.0) == large[:1]  # more than 2 MiB alone
    queue.remove(large[:1])
    assert queue.batch(None, 0.0) == large[1:2]
    assert (queue.clear(), len(queue), queue.batch(0.0, 0.0)) == (2, 0, [])


def test_removed_calls_make_room_by_number_and_by_bytes() -> None:
    few, small = CallQueue(1, 2**30), CallQueue(10, 10_000)
    for queue, one, other in ((few, call(0), call(1)), (small, call(0, 8_000), call(1, 8_000))):
        assert [queue.put(one), queue.put(other)] == [True, False]
        queue.remove([one])
        assert [queue.put(other), len(queue)] == [True, 1]


def test_a_closed_queue_takes_no_calls_and_ends_every_wait() -> None:
    queue = CallQueue(10, 2**30)
    started = time.monotonic()
    threading.Timer(0.1, queue.close).start()
    assert queue.batch(None, 60.0) == []
    queue.wait_closed(60.0)
    assert time.monotonic() - started < 30
    assert (queue.is_closed, queue.put(call(0)), len(queue)) == (True, False, 0)
