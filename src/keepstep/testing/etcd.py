"""Etcd: one or several members of Debian's, started for a test or a drill, with their data in its
directory.

Invariant: after `stop` none of them lives.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepstep.model.launch import Etcd

MISSING = "" if shutil.which("etcd") else "no etcd on this machine: apt-get install etcd-server"
PATIENCE_S = 60.0
HOST = "127.0.0.1"


def free_ports(count: int, host: str = HOST) -> list[int]:
    socks = [socket.socket() for _ in range(count)]
    for sock in socks:
        sock.bind((host, 0))
    ports = [int(sock.getsockname()[1]) for sock in socks]
    for sock in socks:
        sock.close()
    return ports


class Members:
    """Members 0 to count - 1; each can be killed and started again with what it had written."""

    def __init__(
        self, room: Path, count: int = 1, tls: Sequence[str] = (), host: str = HOST
    ) -> None:
        """`tls`: options of etcd's that make it speak TLS; then whoever asks has to wait by
        itself."""
        self.room, self._tls, self._host = room, tls, host
        ports = free_ports(2 * count, host)
        self.ports, self._peers = ports[:count], ports[count:]
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(count):
            self.start(number)
        if not tls:
            self.wait()

    @property
    def etcd(self) -> Etcd:
        return Etcd(tuple((self._host, port) for port in self.ports))

    @property
    def endpoint(self) -> str:
        """As `--rdzv-endpoint` takes it."""
        return ",".join(f"{self._host}:{port}" for port in self.ports)

    def start(self, number: int) -> None:
        peer, client = (
            f"http://{self._host}:{self._peers[number]}",
            f"http{'s' if self._tls else ''}://{self._host}:{self.ports[number]}",
        )
        cluster = ",".join(f"m{n}=http://{self._host}:{port}" for n, port in enumerate(self._peers))
        where = [
            "--name",
            f"m{number}",
            "--data-dir",
            str(self.room / f"m{number}"),
            "--initial-cluster",
            cluster,
        ]
        where += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        where += ["--listen-client-urls", client, "--advertise-client-urls", client, *self._tls]
        with open(self.room / f"m{number}.log", "ab") as log:
            self._running[number] = subprocess.Popen(
                ["etcd", *where], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def wait(self) -> None:
        """Until all that run have a leader."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(self._healthy(number) for number in self._running):
            assert time.monotonic() < deadline, (
                f"etcd has no leader: {(self.room / 'm0.log').read_text()[-2000:]}"
            )
            time.sleep(0.05)

    def kill(self, number: int) -> None:
        process = self._running.pop(number)
        process.kill()
        process.wait()

    def leader(self) -> int:
        for number in self._running:
            status = self._post(number, "maintenance/status")
            if status["header"]["member_id"] == status["leader"]:
                return number
        raise AssertionError("no member says that it leads")

    def stop(self) -> None:
        for number in list(self._running):
            self.kill(number)

    def _healthy(self, number: int) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://{self._host}:{self.ports[number]}/health", timeout=5
            ) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError):
            return False

    def _post(self, number: int, path: str) -> Any:
        request = urllib.request.Request(
            f"http://{self._host}:{self.ports[number]}/v3/{path}", b"{}"
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)
