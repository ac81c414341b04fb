"""Hosts: the addresses of a node, as a person writes them: one, or several with commas between, on
as many network interfaces.

Values only. The first is the one by which nodes find each other; their links use all of them.
"""

from __future__ import annotations

from keepstep.errors import ConfigError
from keepstep.model.wire import MAX_ADDRESSES


def parse_hosts(text: str) -> tuple[str, ...]:
    """Raises ConfigError."""
    hosts = tuple(host.strip() for host in text.split(","))
    if not all(hosts):
        raise ConfigError(f"host: expected an address between commas, found {text!r}")
    if len(set(hosts)) < len(hosts):
        raise ConfigError(f"host: expected each address once, found {text!r}")
    if len(hosts) > MAX_ADDRESSES:
        raise ConfigError(
            f"host: expected at most {MAX_ADDRESSES} addresses, found {len(hosts)} in {text!r}"
        )
    return hosts


def first_host(text: str | None) -> str | None:
    """The one by which others find this node; None where nobody said any. Raises ConfigError."""
    return None if text is None else parse_hosts(text)[0]
