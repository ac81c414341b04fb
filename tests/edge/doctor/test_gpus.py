"""What the driver and its tool tell."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.edge.doctor.gpus import parse_table, read_gpus
from keepstep.model.units import MIB
from tests.edge.doctor.fake_machine import SMI, FakeMachine


def test_a_machine_with_two(machine: FakeMachine) -> None:
    found = read_gpus(machine.host, machine.environ)
    assert (found.on_bus, found.of_driver, found.driver) == (2, 2, "590.86.15")
    assert found.has_tool and found.tool_error == "" and found.refused_files == ()
    assert [gpu.index for gpu in found.gpus] == [0, 1]
    assert found.gpus[0].used_bytes == 4 * MIB and found.gpus[0].persistence is True


def test_the_open_module_names_its_version_otherwise(machine: FakeMachine) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07  Release Build\n"
    machine.write("/proc/driver/nvidia/version", line)
    assert read_gpus(machine.host, machine.environ).driver == "550.90.07"


def test_what_a_device_does_not_tell_is_none() -> None:
    (gpu,) = parse_table("0, [N/A], [N/A], 10, 40, [N/A], [N/A], [N/A], [N/A]\nnot a line\n")
    assert (gpu.persistence, gpu.compute_mode, gpu.uncorrected_errors) == (None, None, None)
    assert (gpu.is_hot, gpu.remap_pending, gpu.remap_failed) == (None, None, None)


def test_an_older_tool_is_asked_in_its_own_words(machine: FakeMachine) -> None:
    asked: list[str] = []

    def output(command: Sequence[str], within_s: float) -> str:
        asked.append(command[1])
        if "clocks_event_reasons" in command[1]:
            raise OSError('Field "clocks_event_reasons.x" is not a valid field to query.')
        return SMI

    machine.calls["output"] = output
    found = read_gpus(machine.host, machine.environ)
    assert len(found.gpus) == 2 and len(asked) == 2 and "clocks_throttle_reasons" in asked[1]


def test_a_tool_that_fails_says_why(machine: FakeMachine) -> None:
    machine.smi = TimeoutError("no answer within 1 s")
    found = read_gpus(machine.host, machine.environ)
    assert (found.tool_error, found.gpus) == ("no answer within 1 s", ())


def test_without_a_driver_nobody_is_asked(machine: FakeMachine) -> None:
    (machine.root / "proc/driver/nvidia/version").unlink()
    found = read_gpus(machine.host, machine.environ)
    assert (found.driver, found.has_tool, found.refused_files) == (None, False, ())
