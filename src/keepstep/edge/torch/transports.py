"""Transports: one life of a group, as what moves its bytes.

    tensors on the CPU       gloo
    tensors on the device    NCCL, where the group has a device

A transport is built, used, and given up as a whole; the next life gets another one. What gloo does
when a peer dies is in `groups.py`. NCCL's communicators are non-blocking and connected at once: a
peer that dies while they are built is an error within a minute and can be given up before, where a
communicator that is built by the first collective would hold the trainer.

Comes in: where the members meet. Goes out: collectives' transports, and what `torch.distributed`
wants to know of them. Decides nothing. NCCL's part has never run: `docs/gpu.md`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from keepstep.errors import ConfigError
from keepstep.model.device import STAYING

MakeBackend = Callable[[Any, int, int, timedelta], Any]


class GroupLife:
    """One life. `group` takes all collectives; `device_backend`: NCCL's part of it, if any."""

    def __init__(self, group: Any, device_backend: Any = None, device: Any = None) -> None:
        self.group = group
        self._device_backend = device_backend
        self._device = device

    def connect(self) -> None:
        """Find all peers on the device. Raises RuntimeError when not all come; blocks until then,
        or until `abort`."""
        if self._device_backend is not None:
            self._device_backend.eager_connect_single_device(self._device)

    def end_on_stream(self) -> Any:
        """An event behind all that the caller has queued on its stream so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def abort(self) -> None:
        """End whatever is under way on the device; gloo cannot. Raises RuntimeError; may wait for
        the device."""
        if self._device_backend is not None:
            self._device_backend.abort()


class Building:
    """A transport on its way. From any thread it can be given up, also while `made` blocks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, device: Any) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._device = device
        self._transport: GroupLife | None = None

    def made(self) -> GroupLife:
        """Raises RuntimeError when not all come."""
        group = dist.ProcessGroup(self._store, self._rank, self._size)
        kinds = dist.ProcessGroup.BackendType
        group._set_default_backend(kinds.GLOO)
        backend = None
        if self._device is not None:
            backend = nccl_backend(
                dist.PrefixStore("cuda", self._store), self._rank, self._size, self._timeout
            )
            group.bound_device_id = self._device
            group._register_backend(self._device, kinds.NCCL, backend)
        transport = self._transport = GroupLife(group, backend, self._device)
        group._register_backend(
            torch.device("cpu"),
            kinds.GLOO,
            dist.ProcessGroupGloo(
                dist.PrefixStore("cpu", self._store), self._rank, self._size, self._timeout
            ),
        )
        transport.connect()
        return transport

    def abort(self) -> None:
        """See `GroupLife.abort`."""
        if self._transport is not None:
            self._transport.abort()


def nccl_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """NCCL's, not yet connected. Raises ConfigError where torch has no NCCL."""
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise ConfigError(
            f"keepstep.init_process_group: expected a torch with NCCL, found {torch.__version__}"
        )
    options = kind.Options()
    options._timeout = timeout
    options.config.blocking = 0
    backend = kind(store, rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


class ShownBackend:
    """What a group shows of itself for one kind of device, for as long as the process lives,
    whatever becomes of the transport below: torch keeps one backend a kind in a group, never takes
    another (`ProcessGroup.hpp`, `setBackend`), and has no constructor for one of Python's."""

    supports_splitting = False  # a group of some of the members is built by itself
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, rank: int, size: int, moves_by: str) -> None:
        self._rank, self._size, self._moves_by = rank, size, moves_by

    def name(self) -> str:
        return self._moves_by

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """It is connected as it is built."""


def stay_environment() -> None:
    """Set what staying in a process needs, as `keepstep run` does, before NCCL reads it. Raises
    ConfigError where the program has chosen otherwise."""
    for variable in STAYING:
        found = os.environ.setdefault(variable.name, variable.value)
        if variable.is_needed and found != variable.value:
            raise ConfigError(
                f"keepstep.init_process_group: expected {variable.name}={variable.value}, found "
                f"{found!r}: {variable.why}"
            )
