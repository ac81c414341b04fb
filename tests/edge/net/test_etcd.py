"""The etcd edge against real etcds that are killed, restarted, silent, or something else."""

from __future__ import annotations

import http.server
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from etcd3gw.lease import Lease

from keepstep.edge.net import etcd as kv_etcd
from keepstep.edge.net.etcd import EtcdClient, _client, open_etcd
from keepstep.edge.os.loop import Loop
from keepstep.errors import MeetingError
from keepstep.model.launch import Etcd
from keepstep.model.units import S_NS
from keepstep.ports import KV
from keepstep.testing.etcd import HOST, MISSING, Members, free_ports

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
PATIENCE_S = 60.0


@pytest.fixture
def members(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Members]:
    members = Members(tmp_path, getattr(request, "param", 1))
    yield members
    members.stop()


def test_a_restart_is_waited_out_by_who_asks_and_by_who_waits(members: Members) -> None:
    told: list[str] = []
    kv = EtcdClient(members.etcd, "j/", told.append)
    kv.swap("before", None, "x")
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(kv.another().wait, ["after"], None)
        members.kill(0)
        asking = threads.submit(kv.read, ["before"])
        members.start(0)
        assert asking.result(PATIENCE_S) == ["x"]
        assert kv.swap("after", None, "y") == "y"
        assert waiting.result(PATIENCE_S) == ["y"]
    where = f"etcd at {HOST}:{members.ports[0]}"
    assert [sentence.partition(", ")[0].partition(" after")[0] for sentence in told] == [
        f"{where} does not answer",
        f"{where} answers again",
    ]


def test_a_short_wait_finds_what_comes_within_it(members: Members) -> None:
    kv = EtcdClient(members.etcd, "j/")
    kv.swap("before", None, "x")

    class Waiting(EtcdClient):
        def _watch(self, key: str, revision: int, within_s: float) -> None:
            kv.swap("after", None, "y")
            super()._watch(key, revision, within_s)

    assert Waiting(members.etcd, "j/").wait(["before", "after"], 0.95) == ["x", "y"]
    assert kv.wait(["never"], 0.2) is None


class Client:
    """A callback client, its loop, and what it was told."""

    def __init__(self, members: Members, outage_s: float = PATIENCE_S) -> None:
        self.loop = Loop()
        self.loop.after(int(PATIENCE_S) * S_NS, lambda: pytest.fail("it does not come about"))
        self.opened: list[KV] = []
        self.failed: list[str] = []
        self.lost: list[str] = []
        self.told: list[str] = []
        self.opening = open_etcd(
            self.loop,
            members.etcd,
            "j/",
            self.opened.append,
            self.failed.append,
            self.lost.append,
            self.told.append,
            outage_s,
        )

    @property
    def kv(self) -> KV:
        self.loop.run(lambda: bool(self.opened))
        return self.opened[0]


def test_its_loop_is_told_when_etcd_is_away_and_when_it_is_back(members: Members) -> None:
    client = Client(members)
    heard: list[object] = []
    assert not client.kv.hosted
    client.kv.swap("before", None, "x", heard.append)
    client.kv.wait(["after"], None, heard.append)
    client.loop.run(lambda: heard == ["x"])
    members.kill(0)
    client.kv.read(["before"], heard.append)
    client.kv.swap("after", None, "y", heard.append)
    client.loop.run(lambda: len(client.told) == 1)
    assert heard == ["x"], "nothing is answered meanwhile"
    members.start(0)
    client.loop.run(lambda: len(heard) == 4)
    assert len(client.told) == 2
    assert heard[1] == ["x"]
    assert sorted(map(str, heard[2:])) == ["['y']", "y"]
    assert client.failed == client.lost == []
    client.kv.close()
    client.loop.close()


def test_an_etcd_that_is_away_too_long_is_lost(members: Members) -> None:
    client = Client(members, outage_s=0.5)
    client.kv.wait(["never"], None, lambda found: pytest.fail("answered"))
    members.kill(0)
    client.kv.read(["k"], lambda found: pytest.fail("answered"))
    client.loop.run(lambda: bool(client.lost))
    assert len(client.lost) == 1
    assert f"{HOST}:{members.ports[0]}" in client.lost[0]
    client.loop.close()


def test_no_etcd_at_all_is_a_failed_opening(members: Members) -> None:
    members.kill(0)
    client = Client(members, outage_s=0.5)
    client.loop.run(lambda: bool(client.failed))
    assert f"{HOST}:{members.ports[0]}" in client.failed[0]
    assert client.opened == client.lost == []
    client.loop.close()


def test_an_opening_that_is_cancelled_asks_no_further(members: Members) -> None:
    members.kill(0)
    before = set(threading.enumerate())
    client = Client(members)
    client.loop.run(lambda: len(client.told) == 1)
    client.opening.cancel()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
    assert set(threading.enumerate()) <= before
    client.loop.post(lambda: client.told.append("last"))
    client.loop.run(lambda: client.told[-1] == "last")
    assert client.opened == client.failed == client.lost == []
    assert len(client.told) == 2
    client.loop.close()


@pytest.mark.parametrize("members", [3], indirect=True)
def test_the_loss_of_etcds_own_leader_is_waited_out(members: Members) -> None:
    kv = EtcdClient(members.etcd, "j/")
    kv.swap("before", None, "x")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(kv.another().wait, ["after"], None)
        members.kill(members.leader())
        assert kv.swap("after", None, "y") == "y"
        assert waiting.result(PATIENCE_S) == ["y"]
        assert kv.read(["before"]) == ["x"]
        members.kill(members.leader())
    with pytest.raises(MeetingError, match="found nothing for 0 s"):
        EtcdClient(
            members.etcd, "j/", outage_s=0.0
        )  # one of three decides nothing and says nothing


def test_who_waits_is_woken_by_the_key_and_not_by_its_next_look(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_etcd, "WATCH_S", 1000.0)
    kv = EtcdClient(members.etcd, "j/")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(kv.another().wait, ["a", "b"], None)
        for key in ("other", "b", "a"):
            kv.swap(key, None, "x")
            kv.read(["a"])
        assert waiting.result(PATIENCE_S) == ["x", "x"]


def test_without_etcd_both_are_told_where_it_was(members: Members) -> None:
    kv = EtcdClient(members.etcd, "j/", outage_s=0.5)
    sentence = (
        rf"expected an answer of etcd at 127\.0\.0\.1:{members.ports[0]}, "
        r"found nothing for 0 s \(.*Connection refused"
    )
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(kv.another().wait, ["k"], None)
        members.kill(0)
        with pytest.raises(MeetingError, match=sentence):
            kv.swap("k", None, "x")
        with pytest.raises(MeetingError, match=sentence):
            waiting.result(PATIENCE_S)


def test_an_endpoint_that_accepts_and_never_answers_is_passed_over(members: Members) -> None:
    with socket.create_server((HOST, 0)) as silent:
        kv = EtcdClient(Etcd((silent.getsockname(), *members.etcd.endpoints)), "j/", outage_s=0.0)
        assert kv.swap("k", None, "x") == "x"


def test_every_key_of_a_job_goes_with_its_lease(members: Members) -> None:
    first, second = EtcdClient(members.etcd, "j/"), EtcdClient(members.etcd, "j/")
    first.swap("a", None, "1")
    second.swap("b", None, "2")
    second.swap("b", "2", "3")
    lease = Lease(first._lease, _client(members.etcd, members.etcd.endpoints[0]))
    assert sorted(lease.keys()) == [b"j/a", b"j/b", b"j/lease"]
    lease.revoke()
    assert EtcdClient(members.etcd, "j/").read(["a", "b"]) == [None, None]
    with pytest.raises(
        MeetingError,
        match="expected an answer of etcd's, found etcdserver: requested lease not found",
    ):
        first.swap("c", None, "1")


def test_who_was_away_too_long_is_told(members: Members) -> None:
    kv = EtcdClient(members.etcd, "j/")
    Lease(kv._lease, _client(members.etcd, members.etcd.endpoints[0])).revoke()
    kv._kept_alive = float("-inf")
    with pytest.raises(
        MeetingError,
        match=r"the job's keys in etcd at 127.* are gone: nobody kept them alive for 900 s",
    ):
        kv.read(["a"])


class _NotEtcd(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def test_something_else_at_the_endpoint_is_said() -> None:
    with http.server.HTTPServer((HOST, 0), _NotEtcd) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(
            MeetingError, match=r"etcd at 127\.0\.0\.1:\d+: expected an answer of etcd's, found"
        ):
            EtcdClient(Etcd((server.server_address[:2],)), "j/")  # type: ignore[arg-type]
        server.shutdown()


def test_no_proxy_is_asked(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://{HOST}:{free_ports(1)[0]}")
    assert EtcdClient(members.etcd, "j/", outage_s=0.0).swap("k", None, "x") == "x"


@pytest.mark.skipif(
    not shutil.which("openssl"), reason="no openssl on this machine to make certificates with"
)
def test_by_tls_both_ends_prove_who_they_are(tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        cert,
        "-days",
        "2",
        "-subj",
        "/CN=test",
    ]
    subprocess.run([*made, "-addext", f"subjectAltName=IP:{HOST}"], check=True, capture_output=True)
    members = Members(
        tmp_path,
        tls=[
            "--cert-file",
            cert,
            "--key-file",
            key,
            "--client-cert-auth",
            "--trusted-ca-file",
            cert,
        ],
    )
    try:
        kv = EtcdClient(replace(members.etcd, ca=cert, cert=cert, key=key), "j/")
        assert kv.swap("k", None, "x") == "x" == kv.wait(["k"], PATIENCE_S)[0]  # type: ignore[index]
        with pytest.raises(MeetingError, match="certificate verify failed"):
            EtcdClient(replace(members.etcd, tls=True), "j/", outage_s=0.0)
        with pytest.raises(MeetingError, match="SSL"):
            EtcdClient(replace(members.etcd, ca=cert), "j/", outage_s=0.0)
    finally:
        members.stop()
