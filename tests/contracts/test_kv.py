"""What every KV does: the first writer wins, nothing is lost, waiting ends when it should. On a
TCPStore and on a real etcd."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from keepstep.edge.net.etcd import EtcdKV
from keepstep.edge.torch.tcp_store import EmbeddedKV, meet_embedded
from keepstep.ports import BlockingKV
from keepstep.testing.etcd import HOST, MISSING, Members, free_ports

PATIENCE_S = 60.0
Client = Callable[[str], BlockingKV]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    if MISSING:
        pytest.skip(MISSING)
    members = Members(tmp_path_factory.mktemp("etcd"))
    yield members
    members.stop()


@pytest.fixture(scope="module")
def hosted() -> EmbeddedKV:
    kv = meet_embedded((HOST, free_ports(1)[0]), "")
    assert kv.hosted
    return kv


@pytest.fixture(params=["embedded", "etcd"])
def client(request: pytest.FixtureRequest) -> Client:
    """Makes a client for the job of this name, which no other test has."""
    test = secrets.token_hex(4)
    if request.param == "embedded":
        kv: EmbeddedKV = request.getfixturevalue("hosted")
        return lambda job: meet_embedded(kv._endpoint, f"{test}-{job}/")
    members: Members = request.getfixturevalue("members")
    return lambda job: EtcdKV(members.etcd, f"{test}-{job}/")


@pytest.fixture
def kv(client: Client) -> BlockingKV:
    return client("j")


def test_the_first_writer_wins_and_all_are_told(kv: BlockingKV) -> None:
    clients = [kv, *(kv.another() for _ in range(5))]
    with ThreadPoolExecutor(6) as threads:
        told = list(
            threads.map(lambda c: c[1].swap("seat", None, f"writer {c[0]}"), enumerate(clients))
        )
    assert len(set(told)) == 1 and told[0] in {f"writer {n}" for n in range(6)}
    assert kv.read(["seat"]) == [told[0]]


def test_who_asks_again_after_a_lost_answer_still_wins(kv: BlockingKV) -> None:
    assert kv.swap("seat", None, "mine") == kv.swap("seat", None, "mine") == "mine"


def test_a_swap_needs_what_it_expects(kv: BlockingKV) -> None:
    assert kv.swap("k", "a", "b") is None, "nothing is there"
    assert kv.read(["k"]) == [None]
    assert kv.swap("k", None, "a") == "a"
    assert kv.swap("k", "x", "b") == "a"
    assert kv.swap("k", "a", "ä\n1 \N{SNOWMAN}") == "ä\n1 \N{SNOWMAN}"
    assert kv.read(["k"]) == ["ä\n1 \N{SNOWMAN}"]


def test_no_swap_is_lost(kv: BlockingKV) -> None:
    def add(client: BlockingKV, times: int) -> None:
        there = client.swap("count", None, "0 start")
        for turn in range(times):
            while True:
                assert there is not None
                mine = f"{int(there.split()[0]) + 1} {id(client)} {turn}"
                if (now := client.swap("count", there, mine)) == mine:
                    there = mine
                    break
                there = now

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(add, kv.another(), 20) for _ in range(3)]:
            done.result(PATIENCE_S)
    assert str(kv.read(["count"])[0]).split()[0] == "60"


def test_many_keys_are_read_in_order(kv: BlockingKV) -> None:
    names = [f"k{n}" for n in range(150)]
    for name in names[::3]:
        kv.swap(name, None, f"at {name}")
    assert kv.read(names) == [f"at {name}" if n % 3 == 0 else None for n, name in enumerate(names)]
    assert kv.read([]) == []


def test_jobs_do_not_see_each_other(client: Client) -> None:
    one, other = client("one"), client("other")
    assert one.swap("k", None, "x") == "x"
    assert other.read(["k"]) == [None]
    assert other.swap("k", None, "y") == "y"


def test_keys_are_waited_for_together_while_others_talk(kv: BlockingKV) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(kv.another().wait, ["a", "b", "c"], PATIENCE_S)
        kv.swap("b", None, "2")
        kv.swap("a", None, "1")
        assert kv.wait(["a", "b"], PATIENCE_S) == ["1", "2"] and not waiting.done()
        kv.swap("c", None, "3")
        assert waiting.result(PATIENCE_S) == ["1", "2", "3"]


def test_nothing_is_waited_for_longer_than_asked(kv: BlockingKV) -> None:
    kv.swap("a", None, "1")
    assert kv.wait(["a", "b"], 0.05) is None
    assert kv.wait(["a"], 0.05) == ["1"]


def test_who_waits_without_end_is_woken(kv: BlockingKV) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(kv.another().wait, ["k"], None)
        kv.swap("k", None, "x")
        assert waiting.result(PATIENCE_S) == ["x"]
