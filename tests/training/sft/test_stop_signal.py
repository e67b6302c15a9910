"""When a signal ends a fine-tuning job."""

import signal

import pytest

from trainspan_training.sft.stop_signal import Stopped, StopSignal


def test_a_signal_ends_a_job_at_once_outside_of_a_step_and_after_the_step_within() -> None:
    stopping = StopSignal()
    with stopping.working():
        stopping.on_signal(signal.SIGTERM, None)
        assert stopping.signal == signal.SIGTERM
        with pytest.raises(Stopped):  # a second one does not wait
            stopping.on_signal(signal.SIGINT, None)
    assert stopping.signal == signal.SIGINT
    with pytest.raises(Stopped):
        StopSignal().on_signal(signal.SIGTERM, None)
    after = StopSignal()
    with after.working():
        pass
    with pytest.raises(Stopped):
        after.on_signal(signal.SIGTERM, None)
