"""etcd KV: `ports.KV` over an etcd (v3, 3.4 or newer) of one or several members: its JSON gateway.

Moves keys and values. Every write is one transaction and every read is linearizable: a member that
is cut off from the others answers nothing, instead of something old. When a member does not answer,
the next endpoint is asked; when none does, all are asked again for `OUTAGE_S`: a restart of etcd or
an election of its leader is over long before, and only then is the memory lost. A wait is a
watch, begun anew every `WATCH_S` from what a read found, so that a connection that died without a
word costs no more than that.

All keys of a job hang on one lease, which every client of the job keeps alive by the way: `LEASE_S`
after the last of them has gone, etcd itself removes them. TLS by PEM files; not here: user names
and passwords.
"""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from keepstep.edge.net.etcd_answers import is_news, lease_of, swapped, values_read
from keepstep.edge.net.kv_client import GivenUp, open_kv
from keepstep.edge.os.loop import Loop
from keepstep.errors import ConfigError, MeetingError
from keepstep.model.decoding import from_json
from keepstep.model.launch import Etcd
from keepstep.ports import KV, Timer

try:
    import requests
    from etcd3gw.client import Etcd3Client
    from etcd3gw.exceptions import (
        ConnectionFailedError,
        ConnectionTimeoutError,
        Etcd3Exception,
        InternalServerError,
    )
    from etcd3gw.lease import Lease
except ImportError as error:
    raise ConfigError(
        "--rdzv-backend etcd: expected the package etcd3gw (pip install 'keepstep[etcd]'), "
        f"found {error}"
    ) from error

ANSWER_S = 3.0  # a member that does not answer for so long is not asked further
RETRY_S = 0.2
OUTAGE_S = 120.0
WATCH_S = 10.0
LEASE_S = 900
assert OUTAGE_S + WATCH_S < LEASE_S / 2, "who has waited out an outage finds the job's keys"
READ_AT_ONCE = 100  # etcd takes 128 operations in a transaction

PASSES = (
    ConnectionFailedError,
    ConnectionTimeoutError,
    InternalServerError,
    requests.RequestException,
)
# what an answer that is none brings about, in the library too
ODD = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
# gRPC's RESOURCE_EXHAUSTED, for which the library has no class; it passes too
OVERLOADED = '"code":8'

T = TypeVar("T")


def open_etcd(
    loop: Loop,
    etcd: Etcd,
    prefix: str,
    opened: Callable[[KV], None],
    failed: Callable[[str], None],
    lost: Callable[[str], None],
    tell: Callable[[str], None] = lambda _: None,
    outage_s: float = OUTAGE_S,
) -> Timer:
    """See `ports.OpenKV`. `prefix` is the job's. The loop calls `tell` when etcd is away and when
    it is back; after `outage_s` seconds without an answer the memory is lost."""

    def dial(given_up: GivenUp) -> EtcdClient:
        def tell_loop(why: str) -> None:
            loop.post(lambda: None if given_up() else tell(why))

        return EtcdClient(etcd, prefix, tell_loop, outage_s, given_up=given_up)

    return open_kv(loop, dial, opened, failed, lost)


class EtcdClient:
    """See `BlockingClient`. `tell` hears, on the thread that asks, when etcd is away and when it is
    back: from this client and not from `another`."""

    slice_s = WATCH_S
    hosted = False

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        tell: Callable[[str], None] = lambda _: None,
        outage_s: float = OUTAGE_S,
        lease: int | None = None,
        given_up: GivenUp = lambda: False,
    ) -> None:
        self._etcd, self._prefix, self._tell, self._outage_s = etcd, prefix, tell, outage_s
        self._given_up = given_up
        self._clients = [_client(etcd, endpoint) for endpoint in etcd.endpoints]
        self._at = 0  # the one that answered last
        self._lease = self._find_lease() if lease is None else lease
        self._kept_alive = time.monotonic()

    def swap(self, key: str, expected: str | None, value: str) -> str | None:
        assert value and expected != value
        self._keep_alive()
        return self._swap(key, expected, value, self._lease)

    def swap_while(
        self, guard: tuple[str, str], key: str, expected: str | None, value: str
    ) -> str | None:
        assert value and expected != value
        self._keep_alive()
        return self._swap(key, expected, value, self._lease, guard)

    def read(self, keys: Sequence[str]) -> list[str | None]:
        self._keep_alive()
        return [value for value, _ in self._read(keys)]

    def wait(self, keys: Sequence[str], within_s: float | None) -> list[str] | None:
        """One key after the other: none goes once it is there."""
        deadline = None if within_s is None else time.monotonic() + within_s
        found: list[str] = []
        while len(found) < len(keys):
            self._keep_alive()
            there = self._read(keys[len(found) :])
            values = [value for value, _ in there]
            came = values.index(None) if None in values else len(values)
            found += [value for value in values[:came] if value is not None]
            if came < len(there):
                left_s = WATCH_S if deadline is None else min(WATCH_S, deadline - time.monotonic())
                if left_s <= 0:
                    return None
                self._watch(keys[len(found)], there[came][1] + 1, left_s)
        return found

    def another(self) -> EtcdClient:
        return EtcdClient(
            self._etcd,
            self._prefix,
            outage_s=self._outage_s,
            lease=self._lease,
            given_up=self._given_up,
        )

    # -- what etcd is asked

    def _swap(
        self,
        key: str,
        expected: str | None,
        value: str,
        lease: int,
        guard: tuple[str, str] | None = None,
    ) -> str | None:
        name = _b64(self._prefix + key)
        nothing = {"key": name, "result": "EQUAL", "target": "CREATE", "create_revision": 0}
        same = {"key": name, "result": "EQUAL", "target": "VALUE", "value": _b64(expected or "")}
        put = {"request_put": {"key": name, "value": _b64(value), "lease": lease}}
        get = {"request_range": {"key": name}}
        holds = [
            {
                "key": _b64(self._prefix + at),
                "result": "EQUAL",
                "target": "VALUE",
                "value": _b64(there),
            }
            for at, there in ([] if guard is None else [guard])
        ]
        question = {
            "compare": [nothing if expected is None else same, *holds],
            "success": [put],
            "failure": [get],
        }
        return self._ask(lambda client: swapped(client.transaction(question), value))

    def _read(self, keys: Sequence[str]) -> list[tuple[str | None, int]]:
        """Each value, and the revision as of which it was read."""
        found: list[tuple[str | None, int]] = []
        for first in range(0, len(keys), READ_AT_ONCE):
            gets = [
                {"request_range": {"key": _b64(self._prefix + key)}}
                for key in keys[first : first + READ_AT_ONCE]
            ]
            found += self._ask(
                lambda client, gets=gets: values_read(  # type: ignore[misc]
                    client.transaction({"success": gets}), len(gets)
                )
            )
        return found

    def _watch(self, key: str, revision: int, within_s: float) -> None:
        """Until something may have happened to the key since `revision`. What goes wrong is found
        by the read that follows."""
        client = self._clients[self._at]
        question: Any = {
            "create_request": {"key": _b64(self._prefix + key), "start_revision": revision}
        }
        try:
            with client.session.post(
                client.get_url("/watch"), json=question, stream=True, timeout=(ANSWER_S, within_s)
            ) as answer:
                for line in answer.iter_lines():
                    if is_news(line):
                        return
        except (requests.RequestException, ValueError):
            pass
        time.sleep(RETRY_S)  # whatever it was, it must not become a loop without a pause

    def _find_lease(self) -> int:
        """The job's; made here when this is its first client. One that was made in vain runs out by
        itself."""
        there = self._read(["lease"])[0][0]
        if not there:
            own = self._ask(lambda client: client.lease(LEASE_S)).id
            there = self._swap("lease", None, str(own), own)
        try:
            return lease_of(there or "")
        except ValueError as error:
            raise MeetingError(
                f"{self._etcd.in_words()}: expected the job's lease, found {there!r:.40}"
            ) from error

    def _keep_alive(self) -> None:
        if time.monotonic() - self._kept_alive < LEASE_S / 10:
            return
        if self._ask(lambda client: Lease(self._lease, client).refresh()) <= 0:
            raise MeetingError(
                f"the job's keys in {self._etcd.in_words()} are gone: nobody kept them alive "
                f"for {LEASE_S} s"
            )
        self._kept_alive = time.monotonic()

    def _ask(self, question: Callable[[Etcd3Client], T]) -> T:
        began, told = time.monotonic(), False
        where = self._etcd.in_words()
        while True:
            for _ in self._clients:
                try:
                    answer = question(self._clients[self._at])
                except (*PASSES, Etcd3Exception) as error:
                    found = _sentence(error)
                    if not isinstance(error, PASSES) and OVERLOADED not in (
                        error.detail_text or ""
                    ):
                        raise MeetingError(
                            f"{where}: expected an answer of etcd's, found {found}"
                        ) from error
                    self._at = (self._at + 1) % len(self._clients)
                except ODD as error:
                    raise MeetingError(
                        f"{where}: expected an answer of etcd's, found {type(error).__name__}: "
                        f"{error}"
                    ) from error
                else:
                    if told:
                        self._tell(f"{where} answers again after {time.monotonic() - began:.1f} s")
                    return answer
            if self._given_up():
                raise MeetingError(f"closed before {where} answered")
            if time.monotonic() - began >= self._outage_s:
                raise MeetingError(
                    f"expected an answer of {where}, found nothing for {self._outage_s:.0f} "
                    f"s ({found})"
                )
            if not told:
                self._tell(
                    f"{where} does not answer, asking again for {self._outage_s:.0f} s ({found})"
                )
                told = True
            time.sleep(RETRY_S)


def _client(etcd: Etcd, endpoint: tuple[str, int]) -> Etcd3Client:
    session = requests.Session()
    # a proxy for the world outside is not asked for the cluster's own etcd
    session.trust_env = False
    session.verify = etcd.ca or True
    if etcd.cert:
        session.cert = (etcd.cert, etcd.key) if etcd.key else etcd.cert
    protocol = "https" if etcd.tls or etcd.ca or etcd.cert else "http"
    return Etcd3Client(*endpoint, protocol, timeout=ANSWER_S, api_path="/v3/", session=session)


def _b64(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "surrogateescape")).decode()


def _sentence(error: Exception) -> str:
    text = getattr(error, "detail_text", None) or str(error) or type(error).__name__
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = from_json(text)["error"]
    return str(text).partition("(Caused by ")[2].removesuffix(")") or str(text)
