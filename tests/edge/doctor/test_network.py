"""Interfaces and names."""

from __future__ import annotations

from keepstep.edge.doctor.network import NameSearch, read_network
from keepstep.model.machine_facts import NetworkInterface, ResolvedName
from tests.edge.doctor.fake_machine import FakeMachine


def test_interfaces(machine: FakeMachine) -> None:
    machine.interface("eth1", "0x1002", "down", 9000, -1)
    machine.interface("eth2", "0x1003", "down", 9000, 25_000)  # up, and no cable
    found = read_network(machine.host, NameSearch(machine.host))
    assert found.interfaces == (
        NetworkInterface("eth0", True, False, 1500, 100_000, 10**6, 0),
        NetworkInterface("eth1", False, False, 9000, None, 10**6, 0),
        NetworkInterface("eth2", False, False, 9000, 25_000, 10**6, 0),
        NetworkInterface("lo", True, True, 65536, None, 10**6, 0),
    )
    assert (found.ports, found.backlog, found.rdma_devices) == ((32768, 60999), 4096, ())


def test_names(machine: FakeMachine) -> None:
    del machine.names["localhost"]
    names = NameSearch(machine.host)
    assert names.host() == ResolvedName("node1", ("10.0.0.7",), 0.0)
    assert names.localhost() == ResolvedName("localhost", (), 0.0)


def test_rdma_devices(machine: FakeMachine) -> None:
    machine.write("/sys/class/infiniband/mlx5_0/node_type", "1: CA\n")
    found = read_network(machine.host, NameSearch(machine.host))
    assert found.rdma_devices == ("mlx5_0",)
