"""Who differs: a majority decides, and without one nobody does."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.preflight.agreement import dissent

values = st.dictionaries(st.integers(0, 30), st.sampled_from("abc"), max_size=12)


@given(values)
def test_the_minority_is_named_or_all_are(by_node: dict[int, str]) -> None:
    found = dissent(by_node)
    counts = Counter(by_node.values())
    if len(counts) < 2:
        assert found is None
        return
    assert found is not None
    value, most = counts.most_common(1)[0]
    if 2 * most > len(by_node):
        assert found.is_decided
        assert set(found.nodes) == {node for node, has in by_node.items() if has != value}
    else:
        assert not found.is_decided and set(found.nodes) == set(by_node)
    assert {node for _, nodes in found.camps for node in nodes} == set(by_node)
    assert [len(nodes) for _, nodes in found.camps] == sorted(counts.values(), reverse=True)
