"""`docs/lost.md` says what the product's own arithmetic says."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.cli.lost_page import FAULTS, FROM_STORE, NODES, POLICIES, FaultCase, goes_on, page
from keepstep.core.redundancy.placement import place
from keepstep.core.redundancy.survival import survival
from keepstep.model.topology import parse_policy, topology
from tests.dashboard.browser import chromium

PAGE = Path(__file__).parents[2] / "docs" / "lost.md"
MEMORY = "other nodes' memory"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def lost(nodes: int) -> FaultCase:
    return next(fault for fault in FAULTS if fault.lost_nodes == nodes)


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_chance_is_what_placement_counts(policy: str, nodes: int) -> None:
    groups = place(parse_policy(policy), topology(NODES)).groups
    chance = survival(groups, nodes)[nodes]
    source = goes_on(lost(nodes), policy)[0]
    if chance == 1:
        assert source == MEMORY
    elif chance == 0:
        assert source == FROM_STORE[0]
    else:
        assert f"{MEMORY} in {float(chance):.0%}" in source


def test_without_copies_a_lost_node_costs_what_the_store_has_not() -> None:
    assert goes_on(lost(1), "none") == FROM_STORE
    assert goes_on(lost(1), "copies:2")[0] == MEMORY


@pytest.mark.parametrize("policy", POLICIES)
def test_when_all_are_lost_nothing_but_the_store_is_left(policy: str) -> None:
    assert goes_on(lost(NODES), policy) == FROM_STORE


def test_the_choices_leave_what_was_chosen() -> None:
    """In a browser, with the page's own script."""
    table = page()[page().index("<table") : page().index("</table>") + len("</table>")]
    script = (PAGE.parent / "lost.js").read_text()
    with chromium() as browser:
        sheet = browser.new_page()
        sheet.set_content(f"<body><script>{script}</script>{table}</body>")
        rows = sheet.locator("tbody tr:visible")
        assert rows.count() == len(FAULTS), "copies:2 at first"
        sheet.locator("select").nth(0).select_option("one node is lost")
        assert [row.split("\t")[:3] for row in rows.all_inner_texts()] == [
            ["one node is lost", "copies:2", MEMORY]
        ]
        sheet.locator("select").nth(1).select_option("")
        assert rows.count() == len(POLICIES)
