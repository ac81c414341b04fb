"""In place: saved tensors into the memory of the live ones, so that nothing gets a new address.

What a `load_state_dict` is given here is the live tensor itself, filled before: torch's own copies
of a tensor into itself are none, an optimizer keeps the very tensors that it had, and a CUDA graph
that was captured over them stays valid. Nothing is made beside them: neither on the host nor on the
device.

Comes in: pairs of a live and a saved tensor. Goes out: the bytes, and which saved tensors found no
place. On a device the copies are ordered in one go and not waited for: whoever reuses the saved
tensors' memory waits (`TorchState.load`).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from operator import not_
from typing import Any

import torch

from keepstep.edge.os.machine import proof_threads
from keepstep.edge.shm import memory
from keepstep.edge.torch.dtensors import is_dtensor
from keepstep.edge.torch.parts import parameters_of
from keepstep.edge.torch.tree import by_address, local_part
from keepstep.model.units import MIB

MUCH_BYTES = 64 * MIB


def takes(live: object, saved: object) -> bool:
    """Whether the saved bytes can be written into the live memory as they are."""
    if not (isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor)):
        return False
    if is_dtensor(live) != is_dtensor(saved):
        return False
    if is_dtensor(live) and (live.device_mesh, live.placements) != (
        saved.device_mesh,  # type: ignore[attr-defined]
        saved.placements,  # type: ignore[attr-defined]
    ):
        return False
    if live.layout is not torch.strided or saved.layout is not torch.strided:
        return False
    if live.is_nested or saved.is_nested or live.is_quantized or saved.is_quantized:
        return False
    mine, theirs = local_part(live), local_part(saved)
    return (
        (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        and not mine.is_conj()
        and not mine.is_neg()
        and not overlaps_itself(mine)
    )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Expanded: several of its values are one place in memory."""
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def fill(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each saved one (second) into the live one (first) that takes it."""
    there = [(local_part(live), local_part(saved)) for live, saved in pairs if live is not saved]
    on_host = [by_address(live) and by_address(saved) for live, saved in there]
    _copy_on_host(
        [
            (live.data_ptr(), saved.data_ptr(), live.nbytes)
            for live, saved in compress(there, on_host)
        ]
    )
    for live, _ in compress(there, on_host):
        torch.autograd.graph.increment_version(live)  # as torch's own copy does
    rest = list(compress(there, map(not_, on_host)))
    if rest:
        lives, sources = (list(some) for some in zip(*rest, strict=True))
        with torch.no_grad():
            torch._foreach_copy_(lives, sources, non_blocking=True)


def _copy_on_host(copies: Sequence[tuple[int, int, int]]) -> None:
    """By memcpy, in threads where it is much. torch's own copy of a tensor has threads that wait
    for each other at the end of each, which takes long where others compute."""
    threads = proof_threads()
    if threads == 1 or sum(nbytes for _, _, nbytes in copies) < MUCH_BYTES:
        memory.copy_all(copies)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        list(pool.map(memory.copy_all, (copies[n::threads] for n in range(threads))))


def fill_states(
    optimizer: torch.optim.Optimizer, saved: Mapping[Any, MutableMapping[str, Any]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The saved states of an optimizer's parameters, by their numbers, into its own; `saved` has
    these in it afterwards, where they take what was saved. Returns these pairs."""
    parameters = parameters_of(optimizer)
    pairs = []
    for index, state in saved.items():
        if not isinstance(index, int) or index >= len(parameters):
            continue
        own = optimizer.state.get(parameters[index], {})
        for key, value in state.items():
            live = own.get(key)
            if takes(live, value):
                pairs.append((live, value))
                state[key] = live
    fill(pairs)
    return pairs


def loads_as_torch_does(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it keeps the tensors that it is given, or copies of them, in its `state`."""
    own = torch.optim.Optimizer.load_state_dict
    return type(optimizer).load_state_dict is own and "load_state_dict" not in vars(optimizer)


def state_names(path: str, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's own tensors, by the names under which they are saved."""
    return {
        f"{path}.state.{index}.{key}": value
        for index, parameter in enumerate(parameters_of(optimizer))
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def lies_within(tensor: object, begin: int, end: int) -> bool:
    """Whether a tensor looks into that memory of the host."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    local = local_part(tensor)
    return local.device.type == "cpu" and begin <= local.data_ptr() < end
