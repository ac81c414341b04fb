"""Which checks are worth the time: never more than there is, best yield first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.preflight.catalogue import CHECKS
from keepstep.core.preflight.selection import choose, expected_s, yield_per_s
from keepstep.model.messages.preflight import CheckRecord

NAMES = [check.name for check in CHECKS]
records = st.builds(
    lambda runs, share, ms: CheckRecord(runs, round(runs * share), runs * ms),
    st.integers(0, 50),
    st.floats(0, 1),
    st.integers(1, 20_000),
)
pasts = st.dictionaries(st.sampled_from(NAMES), records)


@given(pasts, st.floats(0, 60))
def test_what_is_chosen_fits_and_nothing_better_was_left_out(
    past: dict[str, CheckRecord], within_s: float
) -> None:
    chosen = choose(CHECKS, past, within_s)
    names = [check.name for check in chosen.checks]
    assert names == [name for name in NAMES if name in names]
    assert set(names) | set(chosen.skipped) == set(NAMES)
    takes_s = {check.name: expected_s(check, past.get(check.name)) for check in CHECKS}
    assert sum(takes_s[name] for name in names) <= within_s + 1e-9
    by_yield = sorted(CHECKS, key=lambda check: -yield_per_s(check, past.get(check.name)))
    left_s = within_s
    for check in by_yield:
        fits = takes_s[check.name] <= left_s
        assert (check.name in names) == fits
        left_s -= takes_s[check.name] if fits else 0


@given(pasts)
def test_without_a_limit_all_are_run(past: dict[str, CheckRecord]) -> None:
    assert choose(CHECKS, past, None).checks == CHECKS


def test_what_found_something_comes_before_what_never_did() -> None:
    two = [check for check in CHECKS if check.name in ("disk", "memory-speed")]
    past = {"disk": CheckRecord(20, 5, 40_000), "memory-speed": CheckRecord(20, 0, 40_000)}
    assert [check.name for check in choose(two, past, 2.5).checks] == ["disk"]
    other = {"disk": CheckRecord(20, 0, 40_000), "memory-speed": CheckRecord(20, 5, 40_000)}
    chosen = choose(two, other, 2.5)
    assert [check.name for check in chosen.checks] == ["memory-speed"]
    assert chosen.skipped["disk"].endswith("it found something in 0 of 20 runs")


def test_a_machine_is_measured_by_one_at_a_time() -> None:
    """Two at once would each have half of it; a figure that is shared allows for that."""
    for check in CHECKS:
        counts = any(not quantity.is_shared for quantity in check.quantities)
        assert check.is_alone == (counts and not check.needs_fleet), check.name
