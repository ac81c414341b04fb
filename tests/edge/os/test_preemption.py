"""SIGTERM: answered while the main thread sits in one call, and then as deadly as ever. Each case
in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

START = """
import os, signal, sys, threading
from keepstep.edge.os.preemption import Preemption

acted = []
def act():
    acted.append(threading.current_thread().name)
    print("acted", flush=True)

preemption = Preemption(act)
"""


def run(body: str) -> tuple[int, list[str]]:
    """(exit code, lines printed) of a program that begins with START."""
    done = subprocess.run(
        [sys.executable, "-c", START + body], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout.splitlines()


def test_it_acts_and_then_ends_as_sigterm_ends() -> None:
    code, lines = run("preemption.install(); os.kill(os.getpid(), signal.SIGTERM); signal.pause()")
    assert (code, lines) == (-signal.SIGTERM, ["acted"])


def test_it_acts_while_the_main_thread_is_in_one_long_call() -> None:
    """A thread kills, the main thread waits for ever in C code that no Python handler can
    interrupt."""
    body = """
import ctypes
preemption.install()
killer = threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGTERM))
mutex = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
killer.start()
libc.pthread_mutex_lock(mutex)
"""
    code, lines = run(body)
    assert (code, lines) == (-signal.SIGTERM, ["acted"])


def test_a_failure_while_acting_does_not_make_the_process_immortal() -> None:
    body = """
def fail():
    print("acted", flush=True)
    raise TimeoutError("no answer")

Preemption(fail).install()
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""
    assert run(body) == (-signal.SIGTERM, ["acted"])


def test_a_program_s_own_handler_has_the_last_word() -> None:
    body = """
done = threading.Event()
def act():
    os.write(1, b"acted\\n")  # one call each: two threads write
    done.set()

signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"theirs\\n"))
preemption = Preemption(act)
preemption.install()
os.kill(os.getpid(), signal.SIGTERM)
done.wait()
sys.exit(5)
"""
    code, lines = run(body)
    assert code == 5 and sorted(lines) == ["acted", "theirs"]


def test_after_uninstalling_everything_is_as_before() -> None:
    body = """
before = signal.getsignal(signal.SIGTERM)
preemption.install()
preemption.uninstall()
assert signal.getsignal(signal.SIGTERM) is before
assert signal.set_wakeup_fd(-1) == -1
print("clean", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""
    assert run(body) == (-signal.SIGTERM, ["clean"])


def test_somebody_else_s_wakeup_descriptor_hears_too() -> None:
    body = """
import socket
reader, writer = socket.socketpair()
writer.setblocking(False)
signal.set_wakeup_fd(writer.fileno())
preemption.install()
signal.signal(signal.SIGUSR1, lambda *_: None)
os.kill(os.getpid(), signal.SIGUSR1)
assert reader.recv(1)[0] == signal.SIGUSR1
assert acted == []
preemption.uninstall()
assert signal.set_wakeup_fd(-1) == writer.fileno()
"""
    assert run(body) == (0, [])


def test_outside_the_main_thread_it_does_nothing() -> None:
    body = """
thread = threading.Thread(target=preemption.install)
thread.start()
thread.join()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
preemption.uninstall()
"""
    assert run(body) == (0, [])


@pytest.mark.parametrize("parent_dies", [False, True])
def test_a_forked_child_dies_of_its_own_sigterm_and_does_not_wake_the_parent(
    parent_dies: bool,
) -> None:
    body = f"""
preemption.install()
preemption.before_fork()
child = os.fork()
if not child:
    preemption.after_fork_in_child()
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(9)
preemption.after_fork_in_parent()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
assert acted == []
if {parent_dies}:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""
    assert run(body) == ((-signal.SIGTERM, ["acted"]) if parent_dies else (0, []))
