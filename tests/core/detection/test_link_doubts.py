"""Why nobody can tell of a link whether it is slow, and that it is told without flapping."""

from __future__ import annotations

import random

import pytest

from keepstep.core.detection.link_canary import flaw_of_fresh_links, flaw_of_links
from keepstep.core.detection.link_doubts import LinkDoubts, LinksUnknown
from keepstep.core.detection.links import LEAST_PAST, LONG, SlowLinks
from keepstep.model.links import LinkSample
from keepstep.model.units import MIB, MS_NS, S_NS

EVERY_NS = 2 * S_NS


class Mesh:
    """Two nodes that send each other copies."""

    def __init__(self, seed: int = 1) -> None:
        self.links, self.doubts = SlowLinks([None] * 2), LinkDoubts(2)
        self.random, self.now_ns = random.Random(seed), 0
        self.told: list[tuple[bool, str]] = []

    def run(self, times: int, noise: float = 0.02, pause_ns: int = EVERY_NS) -> None:
        for _ in range(times):
            self.now_ns += pause_ns
            for sender in (0, 1):
                mib = 100 * self.random.lognormvariate(0.0, noise)
                self.links.add(sender, 1 - sender, LinkSample(round(mib * MIB), 100 * MS_NS))
                self.doubts.hear(sender, self.now_ns)
            self.links.news()
            self.look()

    def look(self) -> None:
        for told in self.doubts.news(self.links, "", self.now_ns):
            self.told.append((isinstance(told, LinksUnknown), told.doubt))

    def wait(self, seconds: int) -> None:
        for _ in range(seconds // 2):
            self.now_ns += EVERY_NS
            self.look()


def test_it_is_unknown_until_enough_is_learnt() -> None:
    mesh = Mesh()
    mesh.run(LEAST_PAST + LONG - 1)
    assert mesh.told == [(True, "learning")]
    mesh.run(20)
    assert mesh.told == [(True, "learning"), (False, "learning")]


def test_what_varies_too_much_is_unknown_and_does_not_flap() -> None:
    mesh = Mesh()
    mesh.run(400, noise=0.35)  # about at the limit of a third
    kinds = [doubt for _, doubt in mesh.told]
    assert "noise" in kinds
    assert kinds.count("noise") <= 3, mesh.told
    mesh.run(200, noise=0.02)
    assert mesh.told[-1] == (False, "noise")
    assert not mesh.links.noisy()


@pytest.mark.parametrize(
    ("pause_s", "silent_s", "is_told"),
    [(2, 18, False), (2, 26, True), (30, 110, False), (30, 126, True)],
)
def test_how_long_a_node_may_say_nothing_depends_on_its_pauses(
    pause_s: int, silent_s: int, is_told: bool
) -> None:
    mesh = Mesh()
    mesh.run(70, pause_ns=pause_s * S_NS)
    mesh.told.clear()
    mesh.wait(silent_s)
    assert mesh.told == ([(True, "unheard")] if is_told else [])


def test_a_judge_as_it_is_made_sees_a_slow_link_and_one_that_judges_too() -> None:
    assert flaw_of_fresh_links() == ""
    assert flaw_of_links(Mesh().links, 0) == "", "it calls nothing well yet"
    for noise in (0.02, 0.3):
        mesh = Mesh()
        mesh.run(120, noise=noise)
        before = [list(cell.past) for cell in mesh.links._cells.values()]
        for turn in range(3):
            assert flaw_of_links(mesh.links, turn) == ""
        assert [list(cell.past) for cell in mesh.links._cells.values()] == before
        assert mesh.links.news() == [], "the judge itself has learnt nothing of it"


def test_a_judge_that_has_gone_blind_by_what_it_has_learnt_is_found() -> None:
    """As when what it takes for the past is what is there now."""
    mesh = Mesh()
    mesh.run(120)
    for cell in mesh.links._cells.values():
        cell.usual = lambda: None  # type: ignore[method-assign]
    assert "does not see" in flaw_of_links(mesh.links, 0)
