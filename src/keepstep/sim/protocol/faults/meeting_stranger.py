"""Meeting stranger: who reaches where the agents meet, and does not know the job's secret.

Comes some times, and writes where nothing stands yet: seats, verdicts, marks and answers of the
attempt under way and of the next ones, and who coordinates. What it writes is as good as it can be:
words of this release that nobody has signed; signed with another secret; what the job itself has
said, at another key; and what an earlier run under the same secret has said, of an older epoch.
None of it may be heard. The verdicts among it say that the job is to stop, so that one that is
heard ends it.

What it never does: take words away or write over them, which has the job say them again; put back
an older opening; write without end.
"""

from __future__ import annotations

from random import Random

from keepstep.core.recovery.leader_lease import Lease
from keepstep.model.attempts import Arrival, Opening, Verdict
from keepstep.model.units import S_NS
from keepstep.runtime.agent.meeting_record import CALLED_OFF, CODEC, LEADER, OPENING, YES
from keepstep.runtime.agent.signed_kv import EPOCH_LETTERS, MAC_LETTERS, WordSeal
from keepstep.sim.protocol.job.job import SECRET, SimJob

GUESS = "what a stranger guesses"
MAX_TIMES = 8
MAX_WORDS = 4
AHEAD = 3  # attempts from the newest one on


class MeetingStranger:
    """Of one run whose agents sign."""

    def __init__(self, job: SimJob, chance: Random) -> None:
        self._job, self._random = job, chance
        self._right = WordSeal(SECRET, job.plan.job)
        self._wrong = WordSeal(GUESS, job.plan.job)
        until_ns = max(1, job.plan.faults_until_ns)
        for _ in range(chance.randrange(1, MAX_TIMES)):
            job.world.after(chance.randrange(until_ns), None, self._come)

    def _come(self) -> None:
        keys = self._job.around.kv.keys
        if keys is None or keys.why_lost:
            return
        there = keys.written
        newest = max((int(key.split("/")[0]) for key in there if key[0].isdigit()), default=0)
        for _ in range(self._random.randrange(1, MAX_WORDS + 1)):
            key, word = self._word(newest + self._random.randrange(AHEAD))
            if key not in there:
                keys.inject(key, self._as_good_as_it_can(key, word, there))
                self._job.struck(f"a stranger writes at {key} where the nodes meet")

    def _word(self, attempt: int) -> tuple[str, str]:
        """What nobody has said, and where."""
        plan, place = self._job.plan, self._random.randrange(self._job.plan.nodes)
        nodes, ranks = plan.nodes, plan.ranks_per_node
        least = plan.min_nodes or nodes
        seat = Arrival("a stranger's", "10.9.9.9", 9, 9, ranks, nodes, least, None, None)
        stop = Verdict("stop", "a stranger says so", code=9)
        words: list[tuple[str, object]] = [
            (f"{attempt}/verdict", stop),
            (f"{attempt}/verdict", stop),
            (f"{attempt}/seat/{place}", seat),
            (f"{attempt}/full/0", YES),
            (f"{attempt}/ready/{place}", self._random.choice((YES, CALLED_OFF))),
            (f"{attempt}/well/{place}", YES),
            (LEADER, Lease(99, "a stranger", "a stranger")),
        ]
        key, word = self._random.choice(words)
        return key, word if isinstance(word, str) else CODEC.encode(word).decode()

    def _as_good_as_it_can(self, key: str, word: str, there: dict[str, str]) -> str:
        epoch = self._epoch(there)
        alike = [text for at, text in sorted(there.items()) if _what(at) == _what(key)]
        match self._random.randrange(4):
            case 0:
                return word
            case 1:
                return self._wrong.sign(key, f"{epoch:0{EPOCH_LETTERS}x}{word}")
            case 2 if alike:
                return self._random.choice(alike)
        older = max(1, epoch - self._random.randrange(1, S_NS))
        return self._right.sign(key, f"{older:0{EPOCH_LETTERS}x}{word}")

    def _epoch(self, there: dict[str, str]) -> int:
        """The meeting's, which everybody can read."""
        text = there.get(OPENING)
        if text is None:
            return 1
        opening: Opening = CODEC.decode(text[MAC_LETTERS:].encode())
        return opening.first_version


def _what(key: str) -> str:
    """Of which sort it is, whatever its attempt and place."""
    return key.split("/")[1] if "/" in key else key
