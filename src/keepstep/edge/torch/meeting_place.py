"""Meeting place: a TCPStore of this process, at which the ranks of an attempt meet."""

from __future__ import annotations

import ipaddress

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from keepstep.edge.os.machine import address_towards
from keepstep.edge.torch.first_line import first_line
from keepstep.edge.torch.tcp_store import host_store
from keepstep.errors import ConfigError, MeetingError


class StoreMeetingPlaces:
    """See `ports.MeetingPlaces`."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None

    def open(self, host: str, port: int) -> int:
        self._store = None  # the one before gives its port back
        try:
            self._store = host_store((host, port))
        except (OSError, DistError) as error:
            raise MeetingError(
                "expected to be able to make a place for the ranks to meet at "
                f"{host}:{port}, found {first_line(error)}"
            ) from error
        return int(self._store.port)

    def close(self) -> None:
        self._store = None


def local_address(endpoint: tuple[str, int]) -> str:
    """The address under which this machine reaches the endpoint, and is probably reached itself.
    Raises ConfigError."""
    host = endpoint[0]
    try:
        address = address_towards(host)
    except OSError as error:
        raise ConfigError(
            f"--rdzv-endpoint: expected a reachable host, found {host!r} ({error})"
        ) from error
    if ipaddress.ip_address(address).is_loopback and not _names_loopback(host):
        raise ConfigError(
            "host: expected this machine's address for other nodes, found that "
            f"{host!r} means {address} here: set --host"
        )
    return address


def _names_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
