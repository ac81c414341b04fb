"""Names that lead astray, and interfaces that carry nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep.core.doctor.defect import Grade
from keepstep.model.machine_facts import ResolvedName
from tests.core.doctor.sane_machine import ETHERNET, LOOPBACK, found_by, only_defect, with_facts


def host(*addresses: str, took_s: float | None = 0.001) -> ResolvedName:
    return ResolvedName("node1", addresses, took_s)


def ethernet(**changes: Any) -> dict[str, Any]:
    return {"network.interfaces": (replace(ETHERNET, **changes), LOOPBACK)}


@pytest.mark.parametrize(
    ("changes", "check", "grade", "words"),
    [
        (
            {"network.localhost": ResolvedName("localhost", (), 0.0)},
            *("localhost", Grade.BROKEN, "leads nowhere"),
        ),
        (
            {"network.localhost": ResolvedName("localhost", ("10.1.2.3",), 0.0)},
            *("localhost", Grade.BROKEN, "10.1.2.3"),
        ),
        (
            {"network.localhost": ResolvedName("localhost", (), None)},
            *("localhost", Grade.UNKNOWN, "no answer"),
        ),
        ({"network.interfaces": (ETHERNET,)}, "loopback", Grade.BROKEN, "ip link set lo up"),
        ({"network.host": host()}, "host-name", Grade.BROKEN, "leads nowhere"),
        ({"network.host": host("127.0.1.1")}, "host-name", Grade.BROKEN, "reach themselves"),
        ({"network.host": host(took_s=None)}, "host-name", Grade.WARNING, "in time"),
        ({"network.host": host("10.0.0.7", took_s=0.4)}, "host-name", Grade.WARNING, "0.4 s"),
        ({"network.host": host(), "wanted.nodes": 1}, "host-name", Grade.WARNING, "falls back"),
        ({"network.interfaces": (LOOPBACK,)}, "interfaces", Grade.BROKEN, "but loopback"),
        (ethernet(is_up=False), "interfaces", Grade.BROKEN, "but loopback"),
        (ethernet(mtu=576), "interfaces", Grade.WARNING, "ip link set eth0 mtu 1500"),
        (ethernet(errors=10**5), "interfaces", Grade.WARNING, "100000 damaged of 10000000"),
        (ethernet(mbits=100), "interfaces", Grade.WARNING, "100 Mbit/s"),
        (
            {"wanted.environ": {"GLOO_SOCKET_IFNAME": "ib0"}},
            *("chosen-interfaces", Grade.BROKEN, "name one of eth0, lo"),
        ),
        (
            {"wanted.environ": {"NCCL_SOCKET_IFNAME": "=eth"}},
            *("chosen-interfaces", Grade.BROKEN, "NCCL_SOCKET_IFNAME"),
        ),
        ({"network.ports": (60000, 60999)}, "ports", Grade.WARNING, "1000 ports"),
        ({"network.ports": (60000, 60099)}, "ports", Grade.BROKEN, "100 ports"),
        ({"network.ports": (1024, 65535)}, "ports", Grade.WARNING, "29400 or 29500"),
        ({"network.ports": None}, "ports", Grade.UNKNOWN, "port_range"),
        ({"network.backlog": 16}, "backlog", Grade.WARNING, "somaxconn=4096"),
        ({"network.backlog": None}, "backlog", Grade.UNKNOWN, "somaxconn"),
        ({"network.tracked": 260_000}, "tracked-connections", Grade.WARNING, "=524288"),
    ],
)
def test_a_defect_is_named(changes: dict[str, Any], check: str, grade: Grade, words: str) -> None:
    defect = only_defect(changes, check)
    assert defect.grade is grade and words in f"{defect.found} {defect.why} {defect.fix}"


@pytest.mark.parametrize("check", ["loopback", "interfaces", "chosen-interfaces"])
def test_interfaces_that_cannot_be_read_are_unknown(check: str) -> None:
    (defect,) = found_by(check, with_facts({"network.interfaces": None}))
    assert defect.grade is Grade.UNKNOWN


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"network.host": host("127.0.1.1"), "wanted.nodes": 1}, "host-name"),
        (
            {"network.host": host("127.0.1.1"), "wanted.environ": {"GLOO_SOCKET_IFNAME": "eth0"}},
            "host-name",
        ),
        ({"network.interfaces": (LOOPBACK,), "wanted.nodes": 1}, "interfaces"),
        (ethernet(mbits=None, packets=10, errors=5), "interfaces"),
        ({"network.tracked": None, "network.tracked_max": None}, "tracked-connections"),
        *(
            ({"wanted.environ": {"NCCL_SOCKET_IFNAME": said}}, "chosen-interfaces")
            for said in ("eth", "eth0,ib", "=eth0", "^docker,lo", "^=lo")
        ),
    ],
)
def test_what_is_in_order_is_not_named(changes: dict[str, Any], check: str) -> None:
    assert found_by(check, with_facts(changes)) == []
