"""Waiting: how long, on what, and who may end it."""

import contextlib
import os
import threading
import time

import pytest

from disagg.transfer.waiter import READABLE, WRITABLE, Waiter


@pytest.fixture
def waiter():
    with contextlib.closing(Waiter()) as waiter:
        yield waiter


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_a_wait_below_a_millisecond_is_not_rounded_up(waiter):
    times = []
    for _ in range(20):
        start = time.perf_counter()
        waiter.wait(100e-6)
        times.append(time.perf_counter() - start)
    assert min(times) >= 100e-6
    assert min(times) < 900e-6


def test_no_timeout_is_no_wait(waiter):
    start = time.perf_counter()
    waiter.wait(0.0)
    assert time.perf_counter() - start < 0.5


def test_handlers_hear_their_events_until_unwatched(waiter, pipe):
    reading, writing = pipe
    heard = []
    waiter.watch(reading, READABLE, lambda events: heard.append(("read", events)))
    waiter.watch(writing, WRITABLE, lambda events: heard.append(("write", events)))
    waiter.wait(5.0)
    assert heard == [("write", WRITABLE)]
    os.write(writing, b"x")
    waiter.unwatch(writing)
    waiter.unwatch(writing)
    waiter.wait(5.0)
    assert heard[1:] == [("read", READABLE)]
    waiter.watch(reading, 0, heard.append)
    waiter.wait(0.0)
    assert len(heard) == 2


def test_a_handler_may_unwatch_another_of_the_same_round(waiter):
    heard = []
    pipes = [os.pipe() for _ in range(2)]

    def first_come(mine, other):
        def handler(_events):
            heard.append(mine)
            waiter.unwatch(other)
            os.close(other)

        return handler

    for (_, mine), (_, other) in (pipes, pipes[::-1]):
        waiter.watch(mine, WRITABLE, first_come(mine, other))
    waiter.wait(5.0)
    assert len(heard) == 1
    for fd in [pipes[0][0], pipes[1][0], *heard]:
        os.close(fd)


def test_wake_ends_this_wait_or_the_next_but_one_only(waiter):
    waiter.wake()
    waiter.wake()
    start = time.monotonic()
    waiter.wait(30.0)
    waiter.wait(0.02)
    assert 0.01 < time.monotonic() - start < 15
    thread = threading.Timer(0.02, waiter.wake)
    thread.start()
    waiter.wait(30.0)
    thread.join()
    assert time.monotonic() - start < 15


def test_wake_after_close_does_nothing(waiter):
    waiter.close()
    waiter.close()
    waiter.wake()
