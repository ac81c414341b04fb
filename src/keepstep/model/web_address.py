"""Web address: where a page of ours is served, as a person writes it: a port, or a host and a port.

Values only: no name is looked up.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from keepstep.errors import ConfigError

LOOPBACK = "127.0.0.1"
EXPECTED = "a port, or HOST:PORT with a host such as 127.0.0.1, localhost, 0.0.0.0 or [::1]"
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class WebAddress:
    """`port` 0: any that is free."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine reach it. A name counts as one that others reach,
        `localhost` aside: nobody asks what it stands for."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_web_address(text: str) -> WebAddress:
    """Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        is_sound = ":" in host
    else:
        is_sound = host.isascii() and all(c.isalnum() or c in "-._" for c in host)
    is_port = port.isascii() and port.isdecimal() and int(port) <= MAX_PORT
    if not is_sound or not is_port or text.startswith(":"):
        raise ConfigError(f"dashboard_address: expected {EXPECTED}, found {text!r}")
    return WebAddress(host or LOOPBACK, int(port))
