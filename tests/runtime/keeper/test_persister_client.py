"""The persister's pipe: a child that answers nonsense is a dead one, and another one is asked."""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from keepstep.core.wire.codec import MAX_MESSAGE_BYTES
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.runtime.keeper.persister_client import PersisterClient

WITHIN_S = 30.0
ACT = CheckpointAct("drop", 0, 3, 1, 5, (1,))
GOOD = '{"kind":"done","ok":true,"why":"well","there":false}'


class Client:
    """A client whose child runs `program`, and its loop."""

    def __init__(self, program: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.client = PersisterClient([sys.executable, "-c", program], self.selector)
        self.heard: list[ActDone] = []

    def ask(self) -> None:
        self.client.ask(ACT, self.heard.append)

    def until(self, holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + WITHIN_S
        while not holds():
            assert time.monotonic() < until_s, "it does not come about"
            for key, _ in self.selector.select(1.0):
                key.data()


@pytest.fixture
def made() -> Iterator[list[Client]]:
    clients: list[Client] = []
    yield clients
    for client in clients:
        client.client.close()
        client.selector.close()


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
    assert client.heard == [ActDone(True, "well")]


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
    client.ask()
    assert client.client.pid not in (None, first), "another child is asked"


def test_a_line_that_never_ends_is_the_childs_failure(made: list[Client]) -> None:
    client = client_of(
        made,
        f"import sys\nsys.stdout.write('x' * {MAX_MESSAGE_BYTES + 100_000})\n"
        "sys.stdout.flush()\nsys.stdin.read()",
    )
    client.ask()
    client.until(lambda: bool(client.heard))
    assert not client.heard[0].ok


def test_a_word_that_nobody_asked_for_is_passed_over(made: list[Client]) -> None:
    client = client_of(made, f"import sys\nprint({GOOD!r}, flush=True)\nsys.stdin.readline()")
    client.client.start()
    client.until(lambda: not client.client._waiting)
    client.ask()
    client.until(lambda: bool(client.heard))
