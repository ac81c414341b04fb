"""torchtitan on a CPU, which it does not know: without an accelerator it takes CUDA.

Put in front of a script that trains with it."""

import os
from types import SimpleNamespace

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "cpu"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 30)
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.reset_peak_memory_stats = lambda: None
torch.cpu.empty_cache = lambda: None
barrier = torch.distributed.barrier
torch.distributed.barrier = lambda device_ids=None: barrier()  # gloo takes none
if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3 needs a newer torch than 2.13
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout
set_divide_factor = FSDPModule.set_gradient_divide_factor


def set_gradient_divide_factor(module, factor):
    """With a sum and a division: gloo has no sum of what is multiplied before."""
    set_divide_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor

import torchtitan.models.llama3.config_registry as registry  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
    os.environ.setdefault(name, str(value))
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
registry_debugmodel = registry.llama3_debugmodel


def llama3_debugmodel():
    """Its own, with an attention that has a backward pass on a CPU."""
    config = registry_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


registry.llama3_debugmodel = llama3_debugmodel
