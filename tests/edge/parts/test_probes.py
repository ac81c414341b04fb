"""Probes of parts, on machines laid out for them, and on a library that looks like NVML."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from keepstep.edge.doctor.host import Host
from keepstep.edge.parts import nvml, place, traces
from keepstep.edge.parts.amd import probe_amd
from keepstep.edge.parts.clocks import probe_clock
from keepstep.edge.parts.kernel import probe_kernel
from keepstep.edge.parts.nic import probe_nic
from keepstep.edge.parts.place import probe_disk, probe_shm
from keepstep.edge.parts.pressure import probe_pressure
from keepstep.edge.parts.probe import PartLook, Targets
from keepstep.model.parts import (
    ClockReading,
    GpuReading,
    NicReading,
    PlaceReading,
    PortReading,
    PressureReading,
    ProbeAnswer,
    answer_from_line,
)


def lay(root: Path, files: dict[str, str]) -> Host:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root=root)


@pytest.fixture
def targets(tmp_path: Path) -> Targets:
    for name in ("arena", "disk"):
        (tmp_path / name).mkdir()
    return Targets(tmp_path / "arena", tmp_path / "disk", os.getpid())


# -- NVML


class NVMLError(Exception):
    pass


@dataclass
class FakeNvml:
    """GPUs as dictionaries of what each call answers; what is missing is not supported."""

    gpus: list[dict[str, Any]]
    NVMLError: type[Exception] = NVMLError
    asked: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.gpus[index]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def call(handle: dict[str, Any], *arguments: Any) -> Any:
            self.asked.append(name)
            if name not in handle:
                raise NVMLError("Not Supported")
            answer = handle[name]
            return answer(*arguments) if callable(answer) else answer

        return call


@dataclass
class Pci:
    busId: bytes


@dataclass
class Used:
    gpu: int


def h100(bus: bytes = b"00000000:3B:00.0", **changes: Any) -> dict[str, Any]:
    return {
        "nvmlDeviceGetPciInfo": Pci(bus),
        "nvmlDeviceGetName": b"NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetTemperatureThreshold": lambda kind: {1: 92}[kind],
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        "nvmlDeviceGetClockInfo": lambda clock: {1: 1755}[clock],
        "nvmlDeviceGetUtilizationRates": Used(98),
        "nvmlDeviceGetTotalEccErrors": lambda kind, since: {0: 3, 1: 1}[kind],
        "nvmlDeviceGetRemappedRows": (0, 1, 1, 0),
        "nvmlDeviceGetNvLinkState": lambda link: int(link < 17),
        "nvmlDeviceGetNvLinkErrorCounter": lambda link, counter: int(link == 4),
        **changes,
    }


def test_nvml_is_read_field_by_field() -> None:
    assert nvml.look(FakeNvml([h100()])).readings == (
        GpuReading(
            bus="0000:3b:00",
            name="NVIDIA H100 80GB HBM3",
            temperature_c=61,
            margin_c=31,
            reasons=0x4,
            clock_mhz=1755,
            used_ratio=0.98,
            uncorrected=1,
            corrected=3,
            remap_pending=True,
            remap_failed=False,
            links=17,
            link_errors=4,
        ),
    )


def test_what_a_gpu_does_not_tell_is_none() -> None:
    bare = {"nvmlDeviceGetPciInfo": Pci(b"00000000:07:00.0"), "nvmlDeviceGetTemperature": 40}
    assert nvml.look(FakeNvml([bare])).readings == (GpuReading("0000:07:00", temperature_c=40),)


def test_an_old_driver_has_another_name_for_the_reasons() -> None:
    old = h100(nvmlDeviceGetCurrentClocksThrottleReasons=0x8)
    del old["nvmlDeviceGetCurrentClocksEventReasons"]
    [reading] = nvml.look(FakeNvml([old])).readings
    assert isinstance(reading, GpuReading) and reading.reasons == 0x8


def test_a_lost_gpu_gives_no_reading() -> None:
    look = nvml.look(FakeNvml([h100(), {"nvmlDeviceGetPciInfo": Pci(b"00000000:5E:00.0")}]))
    assert len(look.readings) == 1 and not look.blind


@pytest.mark.parametrize("gpus", [[], [h100(nvmlDeviceGetTemperature=0)], [{}]])
def test_nvml_without_a_plausible_temperature_is_blind(gpus: list[dict[str, Any]]) -> None:
    look = nvml.look(FakeNvml(gpus))
    assert "tells a temperature" in look.blind and not look.readings


def test_nvml_that_cannot_begin_is_blind() -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise NVMLError("Driver Not Loaded")

    assert nvml.look(Broken([])).blind == "NVML: Driver Not Loaded"


def test_nvml_is_only_read() -> None:
    fake = FakeNvml([h100()])
    nvml.look(fake)
    assert all(name.startswith("nvmlDeviceGet") for name in fake.asked)


# -- AMD


def test_amd_is_read_from_sys(tmp_path: Path, targets: Targets) -> None:
    card = "/sys/class/drm/card0/device"
    host = lay(
        tmp_path,
        {
            f"{card}/vendor": "0x1002\n",
            f"{card}/uevent": "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:c1:00.0\n",
            f"{card}/hwmon/hwmon3/temp1_input": "71000\n",
            f"{card}/hwmon/hwmon3/temp1_crit": "100000\n",
            f"{card}/gpu_busy_percent": "93\n",
            f"{card}/pp_dpm_sclk": "0: 500Mhz\n1: 1700Mhz *\n",
            f"{card}/ras/umc_err_count": "ue: 2\nce: 5\n",
            "/sys/class/drm/card0-DP-1/device/vendor": "0x1002\n",
            "/sys/class/drm/card1/device/vendor": "0x10de\n",
        },
    )
    assert probe_amd(host, targets, -1).readings == (
        GpuReading(
            bus="0000:c1:00",
            temperature_c=71,
            margin_c=29,
            clock_mhz=1700,
            used_ratio=0.93,
            uncorrected=2,
            corrected=5,
        ),
    )
    (tmp_path / card[1:] / "hwmon/hwmon3/temp1_input").write_text("0\n")
    assert "temperature" in probe_amd(host, targets, -1).blind


# -- network


def interface(name: str, flags: str = "0x1003", **changes: str) -> dict[str, str]:
    values = {
        "flags": flags,
        "operstate": "up",
        "carrier_changes": "2",
        "statistics/rx_packets": "10",
        "statistics/tx_packets": "20",
        "statistics/rx_errors": "1",
        "statistics/tx_errors": "2",
        "statistics/rx_dropped": "3",
        "statistics/tx_dropped": "4",
        **changes,
    }
    return {f"/sys/class/net/{name}/{field}": f"{value}\n" for field, value in values.items()}


def test_interfaces_are_read(tmp_path: Path, targets: Targets) -> None:
    down = interface("eth1", operstate="down")
    host = lay(
        tmp_path,
        {
            **interface("eth0", **{"device/uevent": "DRIVER=mlx5_core"}),
            **down,
            **interface("lo", "0x9"),
            "/sys/class/net/bonding_masters": "",
        },
    )
    look = probe_nic(host, targets, -1)
    assert not look.blind
    assert look.readings == (
        NicReading("eth0", True, 2, 30, 3, 7, 1, 2, 3, 4),
        NicReading("eth1", False, 2, 30, 3, 7, 1, 2, 3, 4, has_device=False),
    )


def port(device: str, number: int = 1, state: str = "4: ACTIVE", **kinds: str) -> dict[str, str]:
    """kinds: a text in the place of all counters below it."""
    counters = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")
    found = {
        **{f"counters/{name}": str(place + 1) for place, name in enumerate(counters)},
        "counters/port_xmit_discards": "5",
        "counters/port_xmit_packets": "6",
        "hw_counters/out_of_sequence": "7",
        "hw_counters/packet_seq_err": "8",
        "hw_counters/local_ack_timeout_err": "9",
        "hw_counters/lifespan": "12",
    }
    found = {name: kinds.get(name.partition("/")[0], text) for name, text in found.items()}
    below = f"/sys/class/infiniband/{device}/ports/{number}"
    state_files = {"state": state, "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
    return {f"{below}/{name}": f"{text}\n" for name, text in {**state_files, **found}.items()}


def test_rdma_ports_are_read_beside_interfaces(tmp_path: Path, targets: Targets) -> None:
    host = lay(
        tmp_path,
        {
            **interface("lo", "0x9"),
            **port("mlx5_0"),
            **port("mlx5_1", 2, "1: DOWN", counters="N/A (no PMA)"),
            **port("irdma0", state="", counters="", hw_counters="18446744073709551615"),
            "/sys/class/infiniband/mlx5_0/fw_ver": "28.39.1002",
            "/sys/class/infiniband/mlx5_0/ports/readme": "",
        },
    )
    look = probe_nic(host, targets, -1)
    assert not look.blind
    assert look.readings == (
        PortReading("irdma0", 1, None),
        PortReading("mlx5_0", 1, 4, 1, 2, 3, 4, 5, 6, 7, 8, 9),
        PortReading("mlx5_1", 2, 1, out_of_sequence=7, sequence_errors=8, timeouts=9),
    )
    line = ProbeAnswer("nic", 1, 1, "", look.readings).to_line()
    assert answer_from_line(line).readings == look.readings


def test_a_machine_without_loopback_is_not_believed(tmp_path: Path, targets: Targets) -> None:
    assert probe_nic(lay(tmp_path, interface("eth0")), targets, -1).blind
    assert probe_nic(Host(root=tmp_path / "nothing"), targets, -1).blind


# -- directories


def test_a_place_takes_bytes_and_gives_them_back(targets: Targets) -> None:
    for probe, directory in ((probe_disk, targets.disk_dir), (probe_shm, targets.arena_dir)):
        [reading] = probe(Host(), targets, -1).readings
        assert isinstance(reading, PlaceReading)
        assert reading.path == str(directory) and reading.is_same and not reading.refusal
        assert reading.took_ns > 0 and reading.total_bytes
        assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    "broken",
    [
        lambda found, written: True,
        lambda found, written: len(found) == len(written),
        lambda found, written: found[:64] == written[:64],
    ],
)
def test_a_place_is_not_judged_by_a_comparison_that_does_not_see(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, broken: Callable[[bytes, bytes], bool]
) -> None:
    monkeypatch.setattr(place, "is_as_written", broken)
    monkeypatch.setattr(os, "urandom", random.Random(1).randbytes)
    for probe in (probe_disk, probe_shm):
        assert probe(Host(), targets, -1) == PartLook(blind="a flipped bit was not seen")


def test_a_comparison_that_sees_nothing_alike_calls_no_place_sick(
    targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "is_as_written", lambda found, written: False)
    look = probe_shm(Host(), targets, -1)
    assert "like themselves" in look.blind and not look.readings


def test_a_place_that_is_gone_is_refused(targets: Targets) -> None:
    targets.disk_dir.rmdir()
    [reading] = probe_disk(Host(), targets, -1).readings
    assert isinstance(reading, PlaceReading) and reading.refusal == "No such file or directory"


def test_a_place_without_room_is_refused(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    [reading] = probe_disk(Host(), targets, -1).readings
    assert isinstance(reading, PlaceReading) and reading.refusal == "No space left on device"


def test_a_file_system_that_forgets_a_bit_is_seen(
    targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = os.pread

    def forgets(fd: int, count: int, at: int) -> bytes:
        data = honest(fd, count, at)
        return bytes([data[0] ^ 4]) + data[1:] if data and not at else data

    monkeypatch.setattr(os, "pread", forgets)
    [reading] = probe_disk(Host(), targets, -1).readings
    assert isinstance(reading, PlaceReading) and not reading.is_same and not reading.refusal


def test_a_file_system_without_nameless_files(
    targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = os.open

    def no_tmpfile(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return honest(path, flags, mode)

    monkeypatch.setattr(os, "open", no_tmpfile)
    [reading] = probe_disk(Host(), targets, -1).readings
    assert isinstance(reading, PlaceReading) and reading.is_same and not reading.refusal
    assert list(targets.disk_dir.iterdir()) == []


# -- pressure, clocks


def test_pressure_is_read(tmp_path: Path, targets: Targets) -> None:
    host = lay(
        tmp_path,
        {
            "/proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 250 kB\n",
            "/proc/pressure/memory": "some avg10=0.00 total=77\nfull total=5\n",
            "/sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3\n",
            "/sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "4\n",
        },
    )
    [reading] = probe_pressure(host, targets, -1).readings
    assert isinstance(reading, PressureReading)
    assert reading.available_ratio == 0.25 and reading.heat == 7
    assert probe_pressure(Host(root=tmp_path / "nothing"), targets, -1).blind


def test_clocks_are_read_close_to_each_other(targets: Targets) -> None:
    look = probe_clock(Host(), targets, -1)
    [reading] = look.readings
    assert isinstance(reading, ClockReading) and 0 <= reading.spread_ns < 10**9
    assert look.cursor >= reading.mono_ns
    assert probe_clock(Host(), targets, 1 << 62).blind == "the monotonic clock went back"


# -- the kernel's log


def record(number: int, text: str, priority: int = 3) -> str:
    return f"{priority},{number},{number * 1000},-;{text}\n SUBSYSTEM=pci\n"


def test_new_lines_of_the_kernel_are_read_once(tmp_path: Path, targets: Targets) -> None:
    log = tmp_path / "dev/kmsg"
    host = lay(
        tmp_path, {"/dev/kmsg": record(5, "NVRM: Xid (PCI:0000:3b:00): 79, of the job before")}
    )
    first = probe_kernel(host, targets, -1)
    assert (first.readings, first.blind, first.cursor) == ((), "", 5)
    with log.open("a") as file:
        file.write(record(6, "usb 1-1: new device"))
        file.write(record(7, "NVRM: Xid (PCI:0000:3b:00): 95, pid=1"))
        file.write(record(8, "NVRM: Xid (PCI:0000:3b:00): 79, a program wrote that", priority=12))
    second = probe_kernel(host, targets, first.cursor)
    assert [(line.at_ns, line.text) for line in second.readings] == [  # type: ignore[union-attr]
        (7_000_000, "NVRM: Xid (PCI:0000:3b:00): 95, pid=1")
    ]
    assert second.cursor == 8
    assert probe_kernel(host, targets, second.cursor).readings == ()


def test_a_log_that_cannot_be_read_is_blindness(tmp_path: Path, targets: Targets) -> None:
    assert "CAP_SYSLOG" in probe_kernel(Host(root=tmp_path), targets, -1).blind
    assert "no lines" in probe_kernel(lay(tmp_path, {"/dev/kmsg": ""}), targets, -1).blind


# -- traces


def test_a_trace_is_played_look_by_look(tmp_path: Path) -> None:
    targets = Targets(tmp_path, tmp_path, 1, tmp_path)
    assert traces.play("nvml", targets, -1) is None
    assert traces.play("nvml", Targets(tmp_path, tmp_path, 1), -1) is None
    lines = [f'[["GpuReading",{{"bus":"0000:3b:00","margin_c":{n}}}]]' for n in (9, 1)]
    (tmp_path / "nvml.jsonl").write_text("\n".join(lines) + "\n")
    seen, cursor = [], -1
    for _ in range(3):
        look = traces.play("nvml", targets, cursor)
        assert look is not None
        cursor = look.cursor
        seen += [reading.margin_c for reading in look.readings]  # type: ignore[union-attr]
    assert seen == [9, 1, 1]
    (tmp_path / "nvml.jsonl").write_text("no trace\n")
    with pytest.raises(ValueError):
        traces.play("nvml", targets, -1)
