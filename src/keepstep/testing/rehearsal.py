"""Rehearsal: a command on every node of a lab, nodes lost by a word from another terminal, and
replaced.

Comes in: a `Lab`, the command of a node, and messages on the lab's socket
(`testing/lab_messages.py`). Goes out: the nodes' output, each line with its node in front, and an
exit code. Knows nothing of what the command does.
"""

from __future__ import annotations

import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from keepstep.edge.net.unix_socket import Mailbox, listen
from keepstep.errors import ConfigError
from keepstep.model.messages.keeper_rank import NotUnderstood
from keepstep.testing import lab as labs
from keepstep.testing.lab import Lab
from keepstep.testing.lab_messages import (
    ASKER_WITH_LAB,
    LAB_WITH_ASKER,
    FromLab,
    KillNode,
    LabNode,
    LabNodes,
    LabRefused,
    ListNodes,
    NodeKilled,
    ToLab,
)

SOCKET = "lab.sock"
TICK_S = 0.05
ANSWER_WITHIN_S = 40.0


class Rehearsal:
    """`command` gives a node's words: a replaced node is started as it was at first."""

    def __init__(
        self,
        lab: Lab,
        command: Callable[[int], Sequence[str]],
        environ: dict[str, str],
        replace_s: float,
        out: TextIO,
    ) -> None:
        self._lab, self._command, self._environ, self._replace_s, self._out = (
            lab,
            command,
            environ,
            replace_s,
            out,
        )
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self._due_s: dict[int, float] = {}
        self._lock = threading.Lock()

    def run(self) -> int:
        """Until every node's command has ended; the first exit code that is not 0."""
        listener = listen(self._lab.directory / SOCKET)
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            for node in self._lab.nodes:
                self._start(node)
            while self._due_s or any(child.poll() is None for child in self._children.values()):
                if selector.select(TICK_S):
                    connection, _ = listener.accept()
                    self._answer(Mailbox(connection, LAB_WITH_ASKER))
                for node in [n for n, at_s in self._due_s.items() if time.monotonic() >= at_s]:
                    self._replace(node)
        for reader in self._readers:
            reader.join()
        listener.close()
        return next((child.returncode for child in self._children.values() if child.returncode), 0)

    def _start(self, node: int) -> None:
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._children[node] = self._lab.start(node, self._command(node), self._environ, **how)
        reader = threading.Thread(target=self._show, args=(node, self._children[node]), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _show(self, node: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self._print(f"[node {node}] {line.decode(errors='replace').rstrip()}")

    def _print(self, line: str) -> None:
        with self._lock:
            print(line, file=self._out, flush=True)

    def _replace(self, node: int) -> None:
        del self._due_s[node]
        self._lab.replace(node)
        self._print(
            f"[lab {self._lab.number}] node {node} is replaced; its address is "
            f"{self._lab.seats[node].address}"
        )
        self._start(node)

    def _answer(self, box: Mailbox) -> None:
        try:
            message = box.recv(1.0)
        except TimeoutError:
            message = None
        if message is not None:
            box.send(self._do(message))
        box.close()

    def _do(self, message: ToLab) -> FromLab:
        match message:
            case ListNodes():
                return LabNodes(tuple(self._describe(node) for node in self._lab.nodes))
            case KillNode(node):
                return self._kill(node)
            case NotUnderstood(why):
                return LabRefused(why)

    def _kill(self, node: int) -> NodeKilled | LabRefused:
        if node not in self._lab.nodes:
            return LabRefused(f"expected a node below {len(self._lab.nodes)} to kill, found {node}")
        if node not in self._lab.seats:
            return LabRefused(f"node {node} is lost already")
        killed = self._lab.kill(node)
        self._children[node].wait()
        self._due_s[node] = time.monotonic() + self._replace_s
        why = (
            f"node {node} is lost with {len(killed)} processes and its memory; a replacement "
            f"comes in {self._replace_s:g} s"
        )
        self._print(f"[lab {self._lab.number}] {why}")
        return NodeKilled(why)

    def _describe(self, node: int) -> LabNode:
        seat = self._lab.seats.get(node)
        if seat is None:
            return LabNode(node, None, 0)
        return LabNode(node, seat.address, len(self._lab.pids(node)))


def socket_path(number: int) -> Path:
    return labs.directory_of(number) / SOCKET


def ask(number: int, message: ListNodes | KillNode) -> LabNodes | NodeKilled:
    """A message to the lab of that number, and its answer. Raises ConfigError when there is none
    that listens, or when it refuses."""
    try:
        box = Mailbox.connect(socket_path(number), ANSWER_WITHIN_S, ASKER_WITH_LAB)
    except OSError as error:
        raise ConfigError(
            f"lab: expected a lab {number} that listens "
            f"({', '.join(map(str, labs.numbers())) or 'none'} found): {error}"
        ) from error
    box.send(message)
    answer: FromLab | None = box.recv(ANSWER_WITHIN_S)
    box.close()
    match answer:
        case LabNodes() | NodeKilled():
            return answer
        case LabRefused(why) | NotUnderstood(why):
            raise ConfigError(f"lab {number}: {why}")
        case None:
            raise ConfigError(f"lab {number}: it ended before it answered")
