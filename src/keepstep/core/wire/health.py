"""Health: whether a link between two keepers is well, away for a moment, or dead.

Comes in: what happened to the connection that carries the link's messages, that something arrived
there, and the time. Goes out: `SendPing`, `Cut` or `Dead`, each with its reason.

Invariant: a link that was away for less than `dead_ns` is never called dead; one that stays away
longer always is. Time in which nobody asked (this process was stopped) counts against nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.model.units import MS_NS, S_NS, human_ns
from keepstep.model.wire import Cut, Dead, SendPing


@dataclass(frozen=True, slots=True)
class LinkTimeouts:
    """`ping_ns`: after so long a silence the other side is asked whether it is there. `silence_ns`:
    after so long a silence the connection is broken, whatever the kernel thinks. `dead_ns`: after
    so long without a connection the other side is gone. `retry_first_ns`, `retry_max_ns`: the waits
    between attempts to connect grow from the one to the other."""

    ping_ns: int = 1 * S_NS
    silence_ns: int = 5 * S_NS
    dead_ns: int = 20 * S_NS
    retry_first_ns: int = 50 * MS_NS
    retry_max_ns: int = 1 * S_NS

    def __post_init__(self) -> None:
        assert 0 < self.ping_ns < self.silence_ns
        assert self.retry_first_ns <= self.retry_max_ns < self.dead_ns

    @classmethod
    def within(cls, dead_ns: int) -> LinkTimeouts:
        """Of a link that is dead after `dead_ns`: what comes before that takes a part of it, and no
        longer than usual."""
        usual = cls()
        silence_ns = min(usual.silence_ns, dead_ns // 2)
        retry_max_ns = min(usual.retry_max_ns, dead_ns // 8)
        return cls(
            ping_ns=silence_ns // 4,
            silence_ns=silence_ns,
            dead_ns=dead_ns,
            retry_first_ns=min(usual.retry_first_ns, retry_max_ns),
            retry_max_ns=retry_max_ns,
        )

    def retry_ns(self, failures: int) -> int:
        """The wait after so many failures in a row: doubling, up to a bound; 0 before the first."""
        if failures == 0:
            return 0
        return min(self.retry_first_ns << min(failures - 1, 30), self.retry_max_ns)


class Health:
    """One link's health. `decide` must be asked at `due_ns`, which is never more than `ping_ns`
    after it was asked last; asking more often changes nothing."""

    def __init__(self, timeouts: LinkTimeouts, now_ns: int) -> None:
        self._timeouts = timeouts
        self.is_open = False
        self.due_ns = now_ns + timeouts.ping_ns
        self._why: str | None = None  # why it is away; None: it was never reached
        self._heard_ns = now_ns
        self._pinged_ns = now_ns
        self._away_since_ns = now_ns
        self._asked_ns = now_ns

    def opened(self, now_ns: int) -> None:
        self.is_open = True
        self._heard_ns = now_ns

    def heard(self, now_ns: int) -> None:
        """Anything arrived on the connection that carries messages."""
        self._heard_ns = now_ns

    def cut(self, why: str, now_ns: int, is_stranger: bool = False) -> None:
        """That connection is gone, or could not be made. `is_stranger`: somebody else may have
        answered there; then why it is away stays, if that was known."""
        if not is_stranger or self._why is None:
            self._why = why
        if self.is_open:
            self.is_open = False
            self._away_since_ns = now_ns

    def decide(self, now_ns: int) -> SendPing | Cut | Dead | None:
        """What the link needs now, if anything."""
        self._pass_over_own_sleep(now_ns)
        found = self._when_open(now_ns) if self.is_open else self._when_away(now_ns)
        self.due_ns = now_ns + self._timeouts.ping_ns
        if self.is_open and not isinstance(found, Cut):
            quiet_since_ns = max(self._heard_ns, self._pinged_ns)
            self.due_ns = min(
                quiet_since_ns + self._timeouts.ping_ns,
                self._heard_ns + self._timeouts.silence_ns + 1,
            )
        return found

    def _pass_over_own_sleep(self, now_ns: int) -> None:
        asleep_ns = now_ns - self._asked_ns
        self._asked_ns = now_ns
        # we were stopped ourselves: that says nothing about the other side
        if asleep_ns > self._timeouts.silence_ns:
            # what happened while nobody asked is younger than that
            self._heard_ns = min(self._heard_ns + asleep_ns, now_ns)
            self._away_since_ns = min(self._away_since_ns + asleep_ns, now_ns)

    def _when_away(self, now_ns: int) -> Dead | None:
        away_ns = now_ns - self._away_since_ns
        if away_ns <= self._timeouts.dead_ns:
            return None
        return Dead(
            f"away for {human_ns(away_ns)}, longer than {human_ns(self._timeouts.dead_ns)}: "
            f"{self._why or 'it was never reached'}"
        )

    def _when_open(self, now_ns: int) -> SendPing | Cut | None:
        silent_ns = now_ns - self._heard_ns
        if silent_ns > self._timeouts.silence_ns:
            return Cut(
                f"silent for {human_ns(silent_ns)}, longer than "
                f"{human_ns(self._timeouts.silence_ns)}"
            )
        if now_ns - max(self._heard_ns, self._pinged_ns) >= self._timeouts.ping_ns:
            self._pinged_ns = now_ns
            return SendPing()
        return None
