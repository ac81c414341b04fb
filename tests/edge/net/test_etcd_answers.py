"""What is etcd's answer, and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.edge.net.etcd_answers import is_news, lease_of, swapped, values_read

X = {"response_range": {"kvs": [{"value": "eA=="}]}}
NOTHING = {"response_range": {"header": {}}}
EMPTY = {"response_range": {"kvs": [{"key": "eA=="}]}}
ODD: list[Any] = [None, 17, "x", [], {}, [X], {"responses": {}}, {"responses": [17]}]


def test_what_etcd_says() -> None:
    answer = {"header": {"revision": "17"}, "responses": [X, NOTHING, EMPTY]}
    assert values_read(answer, 3) == [("x", 17), (None, 17), ("", 17)]
    assert swapped({"succeeded": True, "responses": [{"response_put": {}}]}, "mine") == "mine"
    assert swapped({"responses": [X]}, "mine") == "x"
    assert swapped({"responses": [NOTHING]}, "mine") is None
    assert is_news(b'{"result": {"events": [{}]}}') and is_news(b'{"result": {"canceled": true}}')
    assert not is_news(b"") and not is_news(b'{"result": {"created": true}}')
    assert lease_of("7587848390") == 7587848390


@pytest.mark.parametrize("odd", [*ODD, {"succeeded": "no"}, {"responses": [X, X]}])
def test_what_is_no_answer_to_a_swap_is_refused(odd: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        swapped(odd, "mine")


@pytest.mark.parametrize(
    "odd", [*ODD, {"header": {"revision": "-1"}, "responses": [X]}, {"header": 1, "responses": [X]}]
)
def test_what_is_no_answer_to_a_read_is_refused(odd: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        values_read(odd, 1)


@pytest.mark.parametrize("line", [b"17", b"[]", b"{", b'{"result": 17}', b"[" * 100_000])
def test_what_no_watch_says_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        is_news(line)


@pytest.mark.parametrize("text", ["", "x", "-1", "\u0661", "1" * 21])
def test_what_is_no_lease_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        lease_of(text)
