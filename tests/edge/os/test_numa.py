"""Which node's memory is nearest to a device, as sysfs tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.edge.os.numa import node_near

PLACE = "0000:3b:00.0"


def sysfs(tmp_path: Path, own: str | None, there: str | None) -> Path:
    for path, text in (
        (tmp_path / "bus/pci/devices" / PLACE / "numa_node", own),
        (tmp_path / "devices/system/node/has_memory", there),
    ):
        if text is not None:
            path.parent.mkdir(parents=True)
            path.write_text(f"{text}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("own", "there", "expected"),
    [
        ("1", "0-1", 1),
        ("0", "0-1", 0),
        ("3", "0,2-3", 3),
        ("1", "0,2-3", None),  # it has no memory of its own
        ("0", "0", None),  # there is no other
        ("-1", "0-1", None),  # a virtual machine: the bus tells of none
        ("", "0-1", None),
        ("1", "", None),
        (None, "0-1", None),
        ("1", None, None),
    ],
)
def test_it_is_the_one_that_the_bus_tells_of_where_that_makes_a_difference(
    tmp_path: Path, own: str | None, there: str | None, expected: int | None
) -> None:
    assert node_near(PLACE, sysfs(tmp_path, own, there)) == expected


@pytest.mark.parametrize("told", ["0000:3B:00.0", "00000000:3B:00.0", " 0000:3b:00.0\n"])
def test_a_place_is_known_however_it_is_written(tmp_path: Path, told: str) -> None:
    assert node_near(told, sysfs(tmp_path, "1", "0-1")) == 1


@pytest.mark.parametrize("told", ["", "nothing", "0000:99:00.0", "../../.."])
def test_what_is_not_on_the_bus_is_near_to_nothing(tmp_path: Path, told: str) -> None:
    assert node_near(told, sysfs(tmp_path, "1", "0-1")) is None
