"""What a recording leaves out, and that no judge misses it."""

from __future__ import annotations

import pytest

from keepstep.core.parts.kernel_log import KernelLog
from keepstep.core.parts.redactor import Redactor
from keepstep.model.parts import (
    ClockReading,
    KernelLine,
    NicReading,
    PlaceReading,
    PortReading,
)
from keepstep.model.units import S_NS
from tests.core.parts.test_kernel_log import TABLE, TRACES, lines_of


@pytest.mark.parametrize(
    ("line", "redacted"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=train_secret.py, Ch 00000008",
            "NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=<name>, Ch 00000008",
        ),
        (
            "mlx5_core 0000:c1:00.0 ens1f0: 98:03:9b:aa:bb:cc on node17.corp up 10.1.2.3",
            "mlx5_core 0000:c1:00.0 ens1f0: <mac> on <host>.corp up <ip>",
        ),
        ("nfs: fe80::1:2:3:4 not responding", "nfs: <ip> not responding"),
        ("nfs: 2001:db8:1:2:3:4:5:6 timed out", "nfs: <ip> timed out"),
        (
            "EXT4-fs error (device nvme0n1p2): comm python: /home/anna/run: bad block",
            "EXT4-fs error (device nvme0n1p2): comm <name>: <path>: bad block",
        ),
        (
            "blk_update_request: I/O error, dev sdb, sector 9",
            "blk_update_request: I/O error, dev sdb, sector 9",
        ),
        ("nvme nvme0: serial: S5H9NX0 gone", "nvme nvme0: serial: <id> gone"),
        (
            "GPU UUID 12345678-9abc-def0-1234-56789abcdef0",
            "GPU UUID <uuid>",
        ),
    ],
)
def test_what_a_line_of_the_log_tells_of_people_and_places_is_left_out(
    line: str, redacted: str
) -> None:
    assert Redactor(["node17"]).text(line) == redacted


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace["name"])
def test_a_judge_says_of_a_redacted_log_what_it_says_of_the_other(
    trace: dict[str, object],
) -> None:
    lines = lines_of(trace)
    redactor = Redactor(["node17"])
    redacted = [redactor.reading("kernel", line) for line in lines]
    end_ns = lines[-1].at_ns + S_NS
    said = [
        [(part.part, part.health, part.most) for part in KernelLog(TABLE).add(each, end_ns)]
        for each in (lines, redacted)
    ]
    assert said[0] == said[1]


def test_devices_keep_their_usual_names_and_others_a_number() -> None:
    redactor = Redactor()

    def name(given: str) -> str:
        found = redactor.reading("nic", NicReading(given, True, 0, 0, 0, 0))
        assert isinstance(found, NicReading)
        return found.name

    usual = ["eth0", "enp3s0f1", "ib0", "bond0", "veth0"]
    assert [name(each) for each in usual] == usual
    assert [name(each) for each in ("acme-vpn", "tap-anna", "acme-vpn")] == ["nic0", "nic1", "nic0"]
    port = redactor.reading("nic", PortReading("mlx5_0", 1, 4))
    assert isinstance(port, PortReading) and port.device == "mlx5_0"


def test_a_directory_is_called_what_it_is_for() -> None:
    place = PlaceReading("/home/anna/store", 5, "/home/anna: gone", True, 1, 2)
    redacted = Redactor().reading("disk", place)
    assert redacted == PlaceReading("disk", 5, "<path>: gone", True, 1, 2)
    clock = ClockReading(1, 2, 3)
    assert Redactor().reading("clock", clock) is clock
    line = Redactor(["", "x"]).reading("kernel", KernelLine(1, "x marks"))
    assert line == KernelLine(1, "x marks"), "a name of one letter is no name"
