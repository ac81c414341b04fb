"""Where the time went, as people read it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.economics.goodput import account
from keepstep.dashboard.account_table import account_table, shares
from tests.dashboard.screens import at, shown


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=8).filter(any))
def test_shares_sum_to_the_whole_and_are_rounded_by_less_than_one(amounts: list[int]) -> None:
    found = shares(amounts, 1000)
    assert sum(found) == 1000
    assert all(
        abs(share * sum(amounts) - 1000 * amount) < sum(amounts)
        for share, amount in zip(found, amounts, strict=True)
    )


def test_where_the_time_went() -> None:
    start = [
        at(0, "agent", "job-started", ""),
        at(1000, "keeper", "resumed", "", step=-1, source="fresh", lost_steps=0, epoch=1),
    ]
    spent = account(
        [
            *start,
            at(7000, "rank 0", "rank-bye", "", ok=True),
            at(7_000 + 8_000, "agent", "job-ended", ""),
        ]
    )
    rows = [" ".join(line.split()) for line in shown(account_table(spent)).splitlines()]
    assert "productive 6.00 s 40.0 % steps that count" in rows
    assert "starting 1.00 s 6.7 % before the first step" in rows
    assert "in all 15.00 s 100.0 %" in rows
    assert not any(row.startswith("recovering") for row in rows)
    assert shown(account_table(account([]))).strip() == ""
