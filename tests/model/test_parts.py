"""Parts as text: what a probe says crosses a pipe whole, and nothing else is taken for it."""

from __future__ import annotations

import pytest

from keepstep.errors import ConfigError
from keepstep.model.parts import (
    READINGS,
    GpuReading,
    KernelLine,
    NicReading,
    PartHealth,
    PartNumber,
    PartPolicy,
    PartsReport,
    PlaceReading,
    ProbeAnswer,
    answer_from_line,
    parse_part_policies,
    report_from_text,
)

ANSWER = ProbeAnswer(
    "nvml",
    5,
    6,
    "",
    (
        GpuReading("0000:3b:00", margin_c=-1, used_ratio=0.5, remap_failed=True),
        NicReading("eth0", True, None, 1, 2, 3),
        PlaceReading("/dev/shm", 1, "no", False, None, 7),
        KernelLine(3, 'a "line"\\n'),
    ),
)
REPORT = PartsReport(
    7,
    "boot",
    (PartHealth("gpu 0", "bad", "why", "fix", 2, 3, slows=True),),
    (PartNumber("node_network_up", "device", "eth0", 1.0),),
)


def test_what_is_said_comes_back() -> None:
    assert answer_from_line(ANSWER.to_line()) == ANSWER
    assert ANSWER.to_line().count("\n") == 1
    assert report_from_text(REPORT.to_text()) == REPORT


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        '{"probe":"nic","at_ns":-1,"took_ns":0,"blind":"","readings":[]}',
        '{"probe":"nic","at_ns":1,"took_ns":0,"blind":"","readings":[["Path",{}]]}',
        '{"probe":"nic","at_ns":1,"took_ns":0,"blind":"","readings":[["NicReading",{}]]}',
        '{"probe":"nic","at_ns":1,"took_ns":0,"blind":"","readings":[["NicReading"]]}',
    ],
)
def test_what_is_no_answer_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        answer_from_line(line)


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b'{"at_ns":1,"boot":"","parts":[{"part":"x"}],"numbers":[]}',
        REPORT.to_text().replace(b'"bad"', b'"fine"'),
    ],
)
def test_what_is_no_report_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        report_from_text(text)


def test_policies() -> None:
    assert parse_part_policies("off") is None
    all_of = parse_part_policies("avoid")
    assert all_of is not None and set(all_of.values()) == {PartPolicy.AVOID}
    some = parse_part_policies("gpu=leave, nic=stop")
    assert some is not None
    assert (some["gpu"], some["nic"], some["disk"]) == (
        PartPolicy.LEAVE,
        PartPolicy.STOP,
        PartPolicy.WARN,
    )
    mixed = parse_part_policies("avoid,clock=warn")
    assert mixed is not None and mixed["clock"] is PartPolicy.WARN and mixed["gpu"] == 1


@pytest.mark.parametrize("text", ["maybe", "gpu", "gpu=", "gpu=off", "warp=stop", "gpu=stop,=warn"])
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="sick_parts: expected off"):
        parse_part_policies(text)


def test_every_kind_of_reading_can_cross() -> None:
    assert {type(each).__name__ for each in ANSWER.readings} <= set(READINGS)
