"""Attempts over one store that outlives them, as torchrun's does; each rank is a thread with a
client of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from keepstep.edge.torch.attempts import store_of_attempt, with_own_store

LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=0.3)


@pytest.fixture
def kept() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)


def client(kept: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", kept.port, is_master=False, timeout=LONG)


def attempt(kept: TCPStore, size: int, ranks: Sequence[int], within: timedelta = LONG) -> list[Any]:
    """What these ranks get, or why they do not."""

    def meet(rank: int) -> Any:
        try:
            return store_of_attempt(client(kept), rank, size, within)
        except DistStoreError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(meet, ranks))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_of_an_attempt_meet_and_find_nothing_of_the_one_before(
    kept: TCPStore, size: int
) -> None:
    for number in (b"first", b"second", b"third"):
        stores = attempt(kept, size, range(size))
        assert not any(store.check(["address"]) for store in stores)
        stores[0].set("address", number)
        assert [store.get("address") for store in stores] == [number] * size


@pytest.mark.parametrize("came", [(0,), (1,), (1, 2), (0, 2)])
def test_an_attempt_in_which_some_have_not_come_costs_the_next_one_nothing(
    kept: TCPStore, came: Sequence[int]
) -> None:
    for _ in range(2):
        assert all(isinstance(why, DistStoreError) for why in attempt(kept, 3, came, SHORT)[:1])
    stores = attempt(kept, 3, range(3))
    stores[0].set("address", "new")
    assert [store.get("address") for store in stores] == [b"new"] * 3


def test_who_has_not_come_is_named(kept: TCPStore) -> None:
    (why,) = attempt(kept, 3, [0], SHORT)
    assert "ranks [1, 2] have not come" in str(why)


def test_only_a_store_that_is_kept_over_restarts_is_divided(
    kept: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"tcp://127.0.0.1:{kept.port}"
    given = {"init_method": place, "rank": 0, "world_size": 1, "timeout": LONG}
    assert with_own_store(given) is given, "no launcher"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    own = with_own_store(given)
    assert isinstance(own.pop("store"), PrefixStore)
    assert own == {"rank": 0, "world_size": 1, "timeout": LONG}
    theirs = {**own, "store": kept}
    assert with_own_store(theirs) is theirs, "the program's own store"
    monkeypatch.setenv("KEEPSTEP_ATTEMPT", "1")
    assert with_own_store(given) is given, "keepstep run makes one for each attempt"


def test_where_torch_looks_is_where_it_is_met(
    kept: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the environment, when nothing is given."""
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    before = kept.num_keys()
    met = with_own_store({})
    assert (met["rank"], met["world_size"]) == (0, 1)
    assert kept.num_keys() > before
