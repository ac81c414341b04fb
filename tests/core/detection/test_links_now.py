"""Which links are slow or damage now, as a journal tells."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.detection.links_now import LASTS_NS, NEW_MESH, LinksNow
from keepstep.model.events import Event
from keepstep.model.units import S_NS

SLOW = {"side": "link", "nodes": [0, 2], "ratio": 3.0, "cause": "loss"}


def event(kind: str, mono_ns: int = 0, boot: str = "b", **data: Any) -> Event:
    return Event(0, mono_ns, "keeper", kind, "so it was", data, boot)


def test_a_link_is_slow_until_it_is_over() -> None:
    links = LinksNow([event("slow-link", **SLOW), event("slow-link", **{**SLOW, "nodes": [0, 1]})])
    assert [told.nodes for told in links.slow()] == [(0, 1), (0, 2)]
    links.add(event("slow-link-over", side="sender", nodes=[0, 1]))
    links.add(event("slow-link-over", side="link", nodes=[0, 1]))
    [told] = links.slow()
    assert (told.side, told.nodes, told.ratio, told.cause) == ("link", (0, 2), 3.0, "loss")


def test_damage_is_over_when_nobody_tells_of_it_any_more() -> None:
    links = LinksNow([event("link-damages", 5 * S_NS, node=3, count=12)])
    links.add(event("link-damages", 65 * S_NS, node=3, count=30))
    last_ns = 65 * S_NS + LASTS_NS - 1
    [told] = links.damaging(last_ns, "b")
    assert (told.node, told.count) == (3, 30)
    assert links.damaging(last_ns + 1, "b") == ()
    assert links.damaging(70 * S_NS, "another") == (), "its clock is another one"
    assert links.damaged_counts() == {3: 42}


@pytest.mark.parametrize("kind", NEW_MESH)
def test_nothing_outlives_its_mesh_but_the_count(kind: str) -> None:
    told = [event("slow-link", **SLOW), event("link-damages", node=1, count=10)]
    links = LinksNow([*told, event(kind)])
    assert links.slow() == links.damaging(0, "b") == ()
    assert links.damaged_counts() == {1: 10}


def test_an_odd_event_breaks_nothing() -> None:
    odd: list[dict[str, Any]] = [{}, {"nodes": 3}, {"nodes": ["x"], "ratio": "much", "side": 1}]
    links = LinksNow([event("slow-link", **data) for data in odd])
    assert {told.ratio for told in links.slow()} == {1.0}
    assert LinksNow([event("link-damages", node="x", count=1)]).damaged_counts() == {}
