"""GPUs without a driver, with a wrong one, and with errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep.core.doctor.defect import Grade
from keepstep.model.machine_facts import GpuFacts
from keepstep.model.units import GIB
from tests.core.doctor.sane_machine import GPU, found_by, only_defect, with_facts

NO_GPUS = GpuFacts(0, None, 0, (), False, "", ())


def gpu(**changes: Any) -> dict[str, Any]:
    return {"gpus.gpus": (replace(GPU, index=1, **changes),)}


@pytest.mark.parametrize(
    ("changes", "check", "grade", "words"),
    [
        ({"gpus": replace(NO_GPUS, on_bus=1)}, "gpu-driver", Grade.BROKEN, "1 NVIDIA GPU on"),
        ({"gpus.of_driver": 1}, "gpu-driver", Grade.BROKEN, "1 of 2 GPUs"),
        ({"software.torch_cuda": ""}, "gpu-torch", Grade.WARNING, "without CUDA"),
        ({"software.torch_cuda": None}, "gpu-torch", Grade.UNKNOWN, "CUDA"),
        ({"software.torch_cuda": "13.0"}, "gpu-torch", Grade.BROKEN, "older than 580.65.6"),
        ({"gpus.driver": "470.199.02"}, "gpu-torch", Grade.BROKEN, "older than 525.60.13"),
        ({"gpus.refused_files": ("/dev/nvidia-uvm",)}, "gpu-files", Grade.BROKEN, "nvidia-uvm"),
        ({"wanted.environ": {"CUDA_VISIBLE_DEVICES": ""}}, "gpu-choice", Grade.WARNING, "hides"),
        ({"wanted.environ": {"CUDA_VISIBLE_DEVICES": "-1"}}, "gpu-choice", Grade.WARNING, "hides"),
        (
            {"wanted.environ": {"CUDA_VISIBLE_DEVICES": "0,2"}},
            *("gpu-choice", Grade.BROKEN, "names GPU 2 of 2"),
        ),
        ({"gpus.has_tool": False}, "gpu-tool", Grade.UNKNOWN, "no nvidia-smi"),
        (
            {"gpus.tool_error": "Driver/library version mismatch"},
            *("gpu-tool", Grade.BROKEN, "modprobe nvidia"),
        ),
        ({"gpus.tool_error": "no answer within 1 s"}, "gpu-tool", Grade.UNKNOWN, "--wait"),
        ({"gpus.tool_error": "No devices were found"}, "gpu-tool", Grade.BROKEN, "dmesg"),
        (gpu(uncorrected_errors=1), "gpu-health", Grade.BROKEN, "1 uncorrected ECC error;"),
        (gpu(remap_failed=True), "gpu-health", Grade.BROKEN, "replaced"),
        (gpu(remap_pending=True), "gpu-health", Grade.WARNING, "--gpu-reset -i 1"),
        (gpu(is_hot=True), "gpu-health", Grade.WARNING, "heat"),
        (gpu(compute_mode="Prohibited"), "gpu-settings", Grade.BROKEN, "nvidia-smi -c 0 -i 1"),
        (gpu(compute_mode="Exclusive_Process"), "gpu-settings", Grade.WARNING, "stands by"),
        (
            gpu(used_bytes=30 * GIB),
            "gpu-settings",
            Grade.WARNING,
            "30.0 GiB of GPU 1 is in use, of 80.0 GiB",
        ),
        (gpu(persistence=False), "gpu-settings", Grade.WARNING, "off on GPU 1"),
    ],
)
def test_a_defect_is_named(changes: dict[str, Any], check: str, grade: Grade, words: str) -> None:
    defect = only_defect(changes, check)
    assert defect.grade is grade and words in f"{defect.found}; {defect.why}; {defect.fix}"


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": NO_GPUS},
        {"gpus": NO_GPUS, "software.torch_cuda": ""},
        gpu(
            persistence=None,
            compute_mode=None,
            used_bytes=None,
            total_bytes=None,
            uncorrected_errors=None,
            remap_pending=None,
            remap_failed=None,
            is_hot=None,
        ),
        {"software.torch_cuda": "99.1"},  # a CUDA that is younger than this table
        {"wanted.environ": {"CUDA_VISIBLE_DEVICES": "1,0"}},
        {"wanted.environ": {"CUDA_VISIBLE_DEVICES": "GPU-5c1b8f3e,MIG-7"}},
    ],
)
def test_what_is_in_order_is_not_named(changes: dict[str, Any]) -> None:
    facts = with_facts(changes)
    for check in ("driver", "torch", "files", "choice", "tool", "health", "settings"):
        assert found_by(f"gpu-{check}", facts) == []
