"""Agent line: a rank's line to the agent of its node.

Comes in, on a thread of its own: a peer is lost; the ranks meet again there. Goes out: to the
process's membership, and to the session, which waits for the new meeting place. Without an agent
there is none, and a lost peer is whatever the transport makes of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.wire.conversations import PROCESS_WITH_AGENT
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.model.messages.agent_rank import (
    CannotStay,
    CanStay,
    ConnectionSuspect,
    PeerLostNotice,
    RankHere,
    RegroupAt,
    Regrouped,
    TrainingEnded,
)

SOCKET = "KEEPSTEP_AGENT_SOCKET"
REJOIN = "KEEPSTEP_REJOIN"
CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class MeetAgain:
    """Where the ranks of the next life of the groups meet."""

    attempt: int
    host: str
    port: int


class AgentLine:
    """`on_lost(why)` is called from the thread that listens."""

    def __init__(self, box: Mailbox, rank: int, on_lost: Callable[[str], None]) -> None:
        self._box, self._rank, self._on_lost = box, rank, on_lost
        self._changed = threading.Condition()
        self._order: MeetAgain | None = None
        self._gone = False
        box.send(RankHere(rank, os.getpid()))
        threading.Thread(target=self._listen, name="keepstep-agent-line", daemon=True).start()

    @classmethod
    def find(
        cls, environ: Mapping[str, str], rank: int, on_lost: Callable[[str], None]
    ) -> AgentLine | None:
        """The line, if there is an agent that has one."""
        path = environ.get(SOCKET)
        if not path:
            return None
        try:
            box = Mailbox.connect(Path(path), CONNECT_S, PROCESS_WITH_AGENT)
            return cls(box, rank, on_lost)
        except OSError:  # the agent has died: its ranks train on without one
            return None

    def say_able(self) -> bool:
        """This rank can stay in its process when a peer is lost; False when nobody hears it."""
        return self._box.send(CanStay(self._rank))

    def say_unable(self) -> None:
        """It cannot after all."""
        self._box.send(CannotStay(self._rank))

    def say_ended(self) -> None:
        """The training has ended well and only the process's end is left, in which what was
        abandoned may still fail."""
        self._box.send(TrainingEnded(self._rank))

    def say_regrouped(self) -> None:
        self._box.send(Regrouped(self._rank))

    def suspect(self, why: str) -> None:
        """The transport failed, and nobody has said why."""
        self._box.poke(ConnectionSuspect(self._rank, why))

    def _listen(self) -> None:
        while (message := self._box.recv()) is not None:
            with self._changed:
                match message:
                    case PeerLostNotice(why):
                        self._order = None  # whatever was ordered before has been overtaken
                        self._on_lost(why)
                    case RegroupAt(attempt, host, port):
                        self._order = MeetAgain(attempt, host, port)
                self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def order(self, timeout_s: float) -> MeetAgain | None:
        """Where to meet again, once the agent has said it; None when it has died or does not
        say."""
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None or self._gone, timeout_s)
            order, self._order = self._order, None  # it is for one meeting
            return order

    def close(self) -> None:
        self._box.hang_up()

    def release(self) -> None:
        """In a forked child: the parent alone holds the line."""
        self._box.close()
