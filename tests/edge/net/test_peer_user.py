"""Whose process is at the other end of a loopback connection."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.edge.net.peer_user import user_of_peer

NOBODY = 65534
CALLER = """
import os, socket, sys
os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
made = socket.socket(family)
made.connect((sys.argv[1], int(sys.argv[2])))
made.recv(1)
"""


def listening(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"{host}: {error}")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("user", [os.getuid(), NOBODY])
def test_the_kernel_tells_whose_it_is(host: str, user: int) -> None:
    if user != os.getuid() and os.geteuid() != 0:
        pytest.skip("needs root: another user is played")
    with listening(host) as server:
        server.settimeout(30)
        port = server.getsockname()[1]
        caller = subprocess.Popen([sys.executable, "-c", CALLER, host, str(port), str(user)])
        connection, peer = server.accept()
        with connection:
            assert user_of_peer(peer[:2], (host, port)) == user
        assert caller.wait(30) == 0


def test_an_address_in_the_clothes_of_ipv6() -> None:
    with listening("127.0.0.1") as server:
        port = server.getsockname()[1]
        with socket.socket(socket.AF_INET6) as caller:
            try:
                caller.connect(("::ffff:127.0.0.1", port))
            except OSError as error:
                pytest.skip(f"no IPv6: {error}")
            connection, peer = server.accept()
            with connection:
                assert user_of_peer(peer[:2], ("127.0.0.1", port)) == os.getuid()


def test_who_is_not_in_the_table_is_nobody(tmp_path: Path) -> None:
    ends = ("127.0.0.1", 5), ("127.0.0.1", 6)
    assert user_of_peer(*ends) is None
    assert user_of_peer(*ends, proc=tmp_path) is None, "nor where there is no table"
    (tmp_path / "tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
        "   0: 0100007F:0005 0100007F:0006 01 00000000:00000000 00:00000000 00000000  1234 0 1\n"
        "   1: 0100007F:0006 0100007F:0005 01 00000000:00000000 00:00000000 00000000     0 0 1\n"
    )
    assert sys.byteorder != "little" or user_of_peer(*ends, proc=tmp_path) == 1234
