"""Back-off and Retry-After as pure values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.errors import RegistryError
from smolbuild.registry.retry import (
    RetryPolicy,
    Stop,
    StoppedError,
    Timeouts,
    backoff,
    pause,
    retry_after,
)


class Clock:
    def __init__(self, on_sleep=lambda: None):
        self.slept = []
        self.on_sleep = on_sleep

    def now(self):
        return 0.0

    def monotonic(self):
        return 0.0

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.on_sleep()


@given(
    failures=st.integers(1, 60),
    fraction=st.floats(0, 1, exclude_max=True),
    after=st.none() | st.floats(0, 60),
)
def test_backoff_is_bounded_and_waits_what_was_asked(failures, fraction, after):
    policy = RetryPolicy(base=0.5, cap=15)
    seconds = backoff(policy, failures=failures, fraction=fraction, after=after)
    assert (after or 0) <= seconds <= (after or 0) + min(15, 0.5 * 2.0 ** (failures - 1))


def test_backoff_grows():
    waits = [backoff(RetryPolicy(), failures=n, fraction=0.99, after=None) for n in range(1, 5)]
    assert waits == sorted(waits)
    assert waits[3] > 3 * waits[0]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), (" 0 ", 0.0), ("", None), ("-1", None), ("1.5", None), ("soon", None),
     ("²", None), ("9" * 40, None), ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
     ("Thu, 01 Jan 1970 00:01:40", 90.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0)],
)  # fmt: skip
def test_retry_after(text, seconds):
    assert retry_after({"Retry-After": text}, now=10.0) == seconds


@given(st.text(max_size=40))
def test_any_retry_after_is_a_number_or_nothing(text):
    seconds = retry_after({"Retry-After": text}, now=0.0)
    assert seconds is None or seconds >= 0


def test_pause_ends_soon_after_a_stop():
    stop = Stop()
    clock = Clock(stop.set)
    with pytest.raises(StoppedError):
        pause(clock, 60, stop)
    assert sum(clock.slept) <= 0.2


def test_pause_without_a_stop_is_one_sleep():
    clock = Clock()
    pause(clock, 3, None)
    assert clock.slept == [3]


def test_stop_aborts_whoever_is_watched_then_or_later():
    class Session:
        aborts = 0

        def abort(self):
            self.aborts += 1

    stop, early, late, gone = Stop(), Session(), Session(), Session()
    stop.watch(early)
    stop.watch(gone)
    stop.unwatch(gone)
    stop.check()
    stop.set()
    stop.watch(late)
    assert (early.aborts, late.aborts, gone.aborts) == (1, 1, 0)
    with pytest.raises(RegistryError):
        stop.check()


def test_body_deadline_grows_with_size():
    assert Timeouts(read=10, floor=1000).body(5000) == 15
