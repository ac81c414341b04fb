"""NodeReplacement: of those that are left exactly one asks for each lost node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.lost import LostNode
from keepstep.runtime.agent.node_replacement import NodeReplacement
from tests.runtime.fakes import FakeJournal, FakeProvider


@given(st.integers(1, 6), st.data())
def test_each_lost_node_is_asked_for_once_by_the_first_that_is_left(
    nodes: int, data: st.DataObject
) -> None:
    lost = data.draw(st.lists(st.integers(0, nodes - 1), unique=True, max_size=nodes - 1))
    hosts = [f"host{node}" for node in range(nodes)]
    left = sorted(set(range(nodes)) - set(lost))
    asked = []
    for node in left:
        provider, journal = FakeProvider(), FakeJournal()
        replacement = NodeReplacement(provider, journal, "j", node, hosts)
        for each in lost:
            replacement.lost(each, "away")
        assert replacement.vacant == tuple(sorted(lost))
        assert len(journal.of("replacement-wanted")) == len(provider.asked)
        assert len(journal.of("replacement-asked")) == len(provider.asked)
        asked += provider.asked
    if left[0] < min(lost, default=nodes):  # it was the first from the beginning
        assert asked == [LostNode("j", node, hosts[node], "away") for node in lost]
    assert len(asked) == len(set(asked))


def test_without_a_platform_or_other_nodes_nobody_is_asked() -> None:
    journal, provider = FakeJournal(), FakeProvider()
    NodeReplacement(None, journal, "j", 0, ["a", "b"]).lost(1, "away")
    alone = NodeReplacement(provider, journal, "j")
    alone.lost(1, "away")
    assert journal.events == [] and provider.asked == [] and alone.host_of(1) == ""
