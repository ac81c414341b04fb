"""A persister as a child: one that answers nonsense is ended and told, and counts as dead. What any
`Persisters` does is in `tests/contracts/`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.edge.os.lines import MAX_LINE_BYTES
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.persisters import ChildPersisters
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.model.units import S_NS
from keepstep.runtime.keeper.persister_client import PersisterClient
from keepstep.runtime.persister.conversation import KEEPER_WITH_PERSISTER

WITHIN_S = 30.0
ACT = CheckpointAct("drop", 0, 3, 1, 5, (1,))
GOOD = '{"kind":"done","ok":true,"why":"well","there":false}'


class Client:
    """A client whose child runs `program`, and its loop."""

    def __init__(self, program: str) -> None:
        self.loop = Loop()
        self.told: list[tuple[str, str]] = []
        self.client = PersisterClient(
            ChildPersisters(
                self.loop,
                [sys.executable, "-c", program],
                KEEPER_WITH_PERSISTER,
                lambda kind, why: self.told.append((kind, why)),
            )
        )
        self.heard: list[ActDone] = []

    def ask(self, act: CheckpointAct = ACT) -> None:
        self.client.ask(act, self.heard.append)

    def until(self, holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + WITHIN_S
        timer = self.loop.after(int(WITHIN_S * S_NS), lambda: None)
        self.loop.run(lambda: holds() or time.monotonic() > until_s)
        timer.cancel()
        assert holds(), "it does not come about"

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


@pytest.fixture
def made() -> Iterator[list[Client]]:
    clients: list[Client] = []
    yield clients
    for client in clients:
        client.client.close()
        client.loop.close()


def client_of(made: list[Client], program: str) -> Client:
    made.append(Client(program))
    return made[-1]


def test_an_answer_that_comes_in_pieces(made: list[Client]) -> None:
    half = len(GOOD) // 2
    client = client_of(
        made,
        f"import sys, time\nsys.stdin.readline()\nsys.stdout.write({GOOD[:half]!r})\n"
        f"sys.stdout.flush()\ntime.sleep(0.2)\nprint({GOOD[half:]!r}, flush=True)\n"
        "sys.stdin.readline()",
    )
    client.ask()
    client.until(lambda: bool(client.heard))
    assert client.heard == [ActDone(True, "well")] and client.told == []


@pytest.mark.parametrize(
    "line",
    [
        "hello",
        "{}",
        '{"kind":"done"}',
        '{"kind":"done","ok":1,"why":"","there":false}',
        '{"kind":"act","act":"drop","node":0,"step":3,"epoch":1,"attempt":5,"ranks":[1]}',
        "\\udcff",
    ],
)
def test_an_answer_that_is_none_is_the_childs_failure(made: list[Client], line: str) -> None:
    client = client_of(
        made, f"import sys\nsys.stdin.readline()\nprint({line!r}, flush=True)\nsys.stdin.read()"
    )
    client.ask()
    client.ask()
    first = client.client.pid
    client.until(lambda: len(client.heard) == 2)
    assert [done.ok for done in client.heard] == [False, False] and client.client.pid is None
    assert client.kinds()[-1] == "persister-ended"
    client.ask()
    assert client.client.pid not in (None, first), "another child is asked"


def test_nonsense_is_told_with_the_process_that_said_it(made: list[Client]) -> None:
    client = client_of(made, "print('hello', flush=True)\nimport sys\nsys.stdin.read()")
    client.client.start()
    pid = client.client.pid
    client.until(lambda: bool(client.kinds()))
    client.until(lambda: client.client.pid is None)
    assert client.kinds() == ["message-refused", "persister-ended"]
    assert all(str(pid) in why for _, why in client.told)


def test_a_child_that_says_it_did_not_understand_is_ended(made: list[Client]) -> None:
    line = '{"kind":"not-understood","why":"another release"}'
    client = client_of(
        made, f"import sys\nsys.stdin.readline()\nprint({line!r}, flush=True)\nsys.stdin.read()"
    )
    client.ask()
    client.until(lambda: bool(client.heard))
    assert not client.heard[0].ok and client.client.pid is None


def test_a_line_that_never_ends_is_the_childs_failure(made: list[Client]) -> None:
    client = client_of(
        made,
        f"import sys\nsys.stdout.write('x' * {MAX_LINE_BYTES + 100_000})\n"
        "sys.stdout.flush()\nsys.stdin.read()",
    )
    client.ask()
    client.until(lambda: bool(client.heard))
    assert not client.heard[0].ok


def test_a_word_that_nobody_asked_for_is_passed_over(made: list[Client]) -> None:
    client = client_of(
        made,
        f"import sys\nprint({GOOD!r}, flush=True)\nsys.stdin.readline()\n"
        f"print({GOOD.replace('well', 'asked')!r}, flush=True)\nsys.stdin.readline()",
    )
    client.client.start()
    passed: list[bool] = []
    client.loop.after(S_NS, lambda: passed.append(True))  # by then it has come
    client.until(lambda: bool(passed))
    client.ask()
    client.until(lambda: bool(client.heard))
    assert client.heard[0].why == "asked"


def test_acts_that_the_child_does_not_read_wait_without_holding_up_the_keeper(
    made: list[Client],
) -> None:
    """More than any pipe holds."""
    count, ranks = 300, tuple(range(1000))
    program = (
        "import sys, time\ntime.sleep(0.3)\n"
        f"for _ in range({count}):\n    sys.stdin.readline()\n    print({GOOD!r}, flush=True)\n"
        "sys.stdin.read()"
    )
    client = client_of(made, program)
    for _ in range(count):
        client.ask(CheckpointAct("drop", 0, 3, 1, 5, ranks))
    client.until(lambda: len(client.heard) == count)
    assert all(done.ok for done in client.heard)


def test_one_that_does_not_answer_a_signal_is_ended_at_once(made: list[Client]) -> None:
    client = client_of(made, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)")
    client.ask()
    pid = client.client.pid
    assert pid is not None
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    client.client.abandon("stood still")
    assert [done.ok for done in client.heard] == [False] and not Path(f"/proc/{pid}").exists()


def test_what_it_computes_is_known(made: list[Client]) -> None:
    client = client_of(made, f"while True: pass\nprint({GOOD!r})")
    client.ask()
    until_s = time.monotonic() + WITHIN_S
    while client.client.computed_ns == 0:
        assert time.monotonic() < until_s
