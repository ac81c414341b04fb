"""Signals become calls of the loop; none gets lost, and none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest

from keepstep.edge.os.loop import Loop
from keepstep.edge.os.signals import Signals

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def test_every_signal_is_a_call_and_comes_before_what_was_added_later() -> None:
    before = [signal.getsignal(s) for s in SIGNALS]
    loop = Loop()
    signals = Signals(loop)
    heard: list[object] = []
    one, other = socket.socketpair()
    loop.add_reader(one.fileno(), lambda: heard.append(one.recv(9)))
    for signum in SIGNALS:
        signals.on(signum, lambda signum=signum: heard.append(signum))  # type: ignore[misc]
    other.send(b"x")
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR1)
    loop.run(lambda: len(heard) == 3)
    assert set(heard[:2]) == set(SIGNALS)
    assert heard[2:] == [b"x"]
    signals.close()
    loop.close()
    assert [signal.getsignal(s) for s in SIGNALS] == before
    for end in (one, other):
        end.close()


def test_a_signal_wakes_a_loop_that_sleeps() -> None:
    loop = Loop()
    signals = Signals(loop)
    heard: list[object] = []
    signals.on(signal.SIGUSR1, lambda: heard.append("signal"))
    thread = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    thread.start()
    loop.run(lambda: bool(heard))
    thread.join()
    signals.close()
    loop.close()


def test_what_a_signals_call_raises_ends_run_and_loses_no_other_signal() -> None:
    loop = Loop()
    signals = Signals(loop)
    heard: list[object] = []

    def fail() -> None:
        raise ZeroDivisionError

    signals.on(signal.SIGUSR1, fail)
    signals.on(signal.SIGUSR2, lambda: heard.append("other"))
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    with pytest.raises(ZeroDivisionError):
        loop.run(lambda: False)
    loop.run(lambda: bool(heard))
    signals.close()
    loop.close()


def test_a_forked_child_has_the_signals_as_they_were() -> None:
    loop = Loop()
    signals = Signals(loop)
    heard: list[object] = []
    signals.on(signal.SIGUSR1, lambda: heard.append("signal"))
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGUSR1
    loop.post(lambda: heard.append("nothing came"))
    loop.run(lambda: bool(heard))
    assert heard == ["nothing came"]
    signals.close()
    loop.close()
