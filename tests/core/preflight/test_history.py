"""What is kept of preflights: counts, times, and the first loss of a kind."""

from __future__ import annotations

from keepstep.core.preflight.history import (
    LOSS,
    MOST_KINDS,
    NO_HISTORY,
    changed_losses,
    remember,
)
from keepstep.model.messages.preflight import (
    CheckOutcome,
    CheckReading,
    CheckRecord,
    FleetTrait,
)


def trained(loss: str, kind: str = "cpu") -> CheckReading:
    traits = (FleetTrait(LOSS, loss, kind), FleetTrait("other", "x", kind))
    return CheckReading("training", CheckOutcome.OK, traits=traits, took_ms=3000)


def test_runs_and_finds_are_counted_and_what_gave_no_answer_is_not() -> None:
    readings = [
        CheckReading("disk", CheckOutcome.BAD, took_ms=100),
        CheckReading("memory", CheckOutcome.OK, took_ms=50),
        CheckReading("pcie", CheckOutcome.SKIPPED, took_ms=1),
        CheckReading("network", CheckOutcome.UNKNOWN, took_ms=1),
    ]
    once = remember(NO_HISTORY, readings, frozenset({"disk"}))
    twice = remember(once, readings, frozenset())
    assert once.checks == {"disk": CheckRecord(1, 1, 100), "memory": CheckRecord(1, 0, 50)}
    assert twice.checks["disk"] == CheckRecord(2, 1, 200)


def test_the_first_sound_loss_of_a_kind_stays() -> None:
    suspected = remember(NO_HISTORY, [trained("bad")], frozenset({"training"}))
    assert suspected.losses == {}
    first = remember(suspected, [trained("good")], frozenset())
    assert changed_losses(first, trained("good")) == []
    assert [trait.value for trait in changed_losses(first, trained("bad"))] == ["bad"]
    assert changed_losses(first, trained("bad", "another cpu")) == []
    assert remember(first, [trained("bad")], frozenset()).losses == first.losses


def test_it_does_not_grow_without_end() -> None:
    history = NO_HISTORY
    for kind in range(MOST_KINDS + 20):
        history = remember(history, [trained("loss", f"kind {kind}")], frozenset())
    assert len(history.losses) == MOST_KINDS and f"kind {kind}" in history.losses
