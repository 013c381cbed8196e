"""Garbage collection is paused until the last pause ends."""

from __future__ import annotations

import gc
import threading

import pytest

from spmoe.gc_pause import gc_paused


def test_pauses_nest() -> None:
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), gc_paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pause_outlasts_that_of_another_thread() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with gc_paused():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(10)
    with gc_paused():
        leave.set()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()
