"""GPUs: whether driver, devices and torch belong together, and the devices are healthy.

Comes in: what PCI, the kernel module and `nvidia-smi` tell. Goes out: defects. On a machine without
an NVIDIA device there is nothing to judge.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.core.doctor.defect import Defect, DoctorCheck, broken, silence, warning
from keepstep.model.machine_facts import GpuHealth, MachineFacts
from keepstep.model.units import GIB, counted, human_bytes

# By major version of CUDA: the oldest driver that runs it (NVIDIA's table of minor version
# compatibility).
OLDEST_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
MAX_IDLE_BYTES = GIB


def gpu_driver(facts: MachineFacts) -> Iterator[Defect]:
    """Whether there is a driver for the devices that are there, and for all of them."""
    gpus = facts.gpus
    if gpus.on_bus and gpus.driver is None:
        yield broken(
            f"{counted(gpus.on_bus, 'NVIDIA GPU')} on the bus, and no driver",
            "torch sees no GPU",
            "install NVIDIA's driver and modprobe nvidia; in a container: docker run --gpus all",
        )
    elif gpus.driver is not None and gpus.of_driver < gpus.on_bus:
        yield broken(
            f"the driver has {gpus.of_driver} of {gpus.on_bus} GPUs",
            "ranks of the missing ones do not start",
            "look for Xid in dmesg, reset it (nvidia-smi --gpu-reset) or reboot, else replace it",
        )


def gpu_torch(facts: MachineFacts) -> Iterator[Defect]:
    """Whether torch can use the driver that is there."""
    gpus, cuda = facts.gpus, facts.software.torch_cuda
    if gpus.driver is None or facts.software.torch is None:
        return
    if cuda is None:
        yield silence("the CUDA that torch was built for")
    elif not cuda:
        yield warning(
            f"torch {facts.software.torch} is built without CUDA, and there are GPUs",
            "training computes on the CPU",
            "pip install torch --index-url https://download.pytorch.org/whl/cu128",
        )
    elif (oldest := OLDEST_DRIVERS.get(_version(cuda)[0])) and _version(gpus.driver) < oldest:
        needed = ".".join(map(str, oldest))
        yield broken(
            f"driver {gpus.driver} is older than {needed}, and torch is built for CUDA {cuda}",
            "torch sees no GPU",
            f"install driver {needed} or newer, or a torch built for an older CUDA",
        )


def gpu_files(facts: MachineFacts) -> Iterator[Defect]:
    """Whether this user may open the devices."""
    refused = facts.gpus.refused_files
    if facts.gpus.driver is not None and refused:
        yield broken(
            f"{', '.join(refused)} cannot be opened",
            "torch sees no GPU",
            "nvidia-modprobe -u -c 0 where they are missing, docker run --gpus all in a "
            "container, else add this user to the group that owns them",
        )


def gpu_choice(facts: MachineFacts) -> Iterator[Defect]:
    """Whether CUDA_VISIBLE_DEVICES names devices that are there."""
    said = facts.wanted.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None or not facts.gpus.of_driver:
        return
    names = [name.strip() for name in said.split(",") if name.strip()]
    if not names or names[0] == "-1":
        yield warning(
            f"CUDA_VISIBLE_DEVICES={said} hides every GPU",
            "training computes on the CPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    numbers = [int(name) for name in names if name.isdecimal()]
    wrong = [number for number in numbers if number >= facts.gpus.of_driver]
    if wrong:
        yield broken(
            f"CUDA_VISIBLE_DEVICES={said} names GPU {wrong[0]} of {facts.gpus.of_driver}",
            "CUDA ignores it and all behind it: their ranks have no device",
            "unset CUDA_VISIBLE_DEVICES, or name those that nvidia-smi -L lists",
        )


def gpu_tool(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the driver answers."""
    gpus = facts.gpus
    if gpus.driver is None:
        return
    if not gpus.has_tool:
        yield silence("the GPUs' health: there is no nvidia-smi")
    elif "mismatch" in gpus.tool_error:
        yield broken(
            f"nvidia-smi: {gpus.tool_error}",
            "the driver was updated under the loaded module: nothing that starts now sees a GPU",
            "reboot, or end what uses the GPUs, then rmmod nvidia_uvm nvidia and modprobe nvidia",
        )
    elif gpus.tool_error.startswith("no answer"):
        yield silence(f"the GPUs' health: nvidia-smi: {gpus.tool_error}; --wait gives it longer")
    elif gpus.tool_error:
        yield broken(
            f"nvidia-smi: {gpus.tool_error}",
            "the driver does not work",
            "look for NVRM and Xid in dmesg; reload the driver or reboot",
        )


def gpu_health(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the devices have errors that come again."""
    for gpu in facts.gpus.gpus:
        if gpu.uncorrected_errors:
            yield broken(
                f"GPU {gpu.index} has {counted(gpu.uncorrected_errors, 'uncorrected ECC error')}",
                "its memory has lost bits: ranks on it crash",
                f"nvidia-smi --gpu-reset -i {gpu.index} once nothing uses it, and replace it when "
                "they come again",
            )
        if gpu.remap_failed:
            yield broken(
                f"GPU {gpu.index} has no spare rows left for damaged memory",
                "its memory loses bits, and cannot be mended any more",
                "take it out of service, and have it replaced",
            )
        elif gpu.remap_pending:
            yield warning(
                f"GPU {gpu.index} has damaged rows that wait to be remapped",
                "its memory may lose bits until then",
                f"nvidia-smi --gpu-reset -i {gpu.index}, or reboot",
            )
        if gpu.is_hot:
            yield warning(
                f"GPU {gpu.index} is slowed down for its heat",
                "all ranks wait for the slowest",
                f"look at fans and airflow (nvidia-smi -q -d TEMPERATURE -i {gpu.index})",
            )


def gpu_settings(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the devices are set up for jobs that restart, and free."""
    for gpu in facts.gpus.gpus:
        if gpu.compute_mode in ("Prohibited", "Exclusive_Process", "Exclusive_Thread"):
            grade = broken if gpu.compute_mode == "Prohibited" else warning
            yield grade(
                f"GPU {gpu.index} has compute mode {gpu.compute_mode}",
                "a replacement that stands by cannot share it with the rank that it replaces",
                f"nvidia-smi -c 0 -i {gpu.index}",
            )
        if gpu.used_bytes is not None and gpu.used_bytes > MAX_IDLE_BYTES:
            yield warning(
                f"{human_bytes(gpu.used_bytes)} of GPU {gpu.index} is in use{_of_all(gpu)}",
                "a rank there has less memory than it counts on",
                f"end what uses it (nvidia-smi, or fuser -v /dev/nvidia{gpu.index})",
            )
    asleep = [str(gpu.index) for gpu in facts.gpus.gpus if gpu.persistence is False]
    if asleep:
        yield warning(
            f"persistence mode is off on GPU {', '.join(asleep)}",
            "the driver unloads when the last rank ends, and every restart waits for it",
            "nvidia-smi -pm 1, or systemctl enable --now nvidia-persistenced",
        )


def _of_all(gpu: GpuHealth) -> str:
    return "" if gpu.total_bytes is None else f", of {human_bytes(gpu.total_bytes)}"


def _version(text: str) -> tuple[int, ...]:
    """(0,) of what is no version, which is older than any."""
    parts = text.split(".")
    return tuple(int(part) for part in parts if part.isdecimal()) or (0,)


CHECKS = (
    DoctorCheck("gpu-driver", gpu_driver),
    DoctorCheck("gpu-torch", gpu_torch),
    DoctorCheck("gpu-files", gpu_files),
    DoctorCheck("gpu-choice", gpu_choice),
    DoctorCheck("gpu-tool", gpu_tool),
    DoctorCheck("gpu-health", gpu_health),
    DoctorCheck("gpu-settings", gpu_settings),
)
