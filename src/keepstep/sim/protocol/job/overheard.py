"""Overheard: what the processes of one node say to each other and write into its memory, told to
those who judge.

Comes in: messages as they are sent or heard, and header pages as they are written. Goes out: what
that means for a run (`observer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.edge.shm.slot_header import parse_page
from keepstep.errors import DamageError
from keepstep.model.messages.keeper_rank import (
    BeginMesh,
    JoinVote,
    StateLoaded,
    StateOffered,
    TrainingPermitted,
)
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.runtime.rank.stage import Stage
from keepstep.sim.protocol.job.observer import Observers
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.world.boxes import LocalSockets
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import Process


class Overheard:
    """On one machine."""

    def __init__(
        self,
        sockets: LocalSockets,
        machine: Machine,
        programs: Mapping[Process, Program],
        observers: Observers,
    ) -> None:
        self._machine = machine
        self._programs = programs
        self._observers = observers
        self._offers: dict[Process, StateOffered] = {}  # the newest that each rank has heard
        self._epochs: dict[Process, int] = {}  # that each rank has begun
        sockets.on_sent = self._sent
        sockets.on_heard = self._heard
        if observers.wants("overwrites") or observers.wants("sealed"):
            machine.files.on_put = self._put

    def _sent(self, process: Process, message: Any) -> None:
        program = self._programs.get(process)
        match message:
            case JoinVote() if program is not None:
                self._observers.joined(program)
            case StateLoaded(_, number) if program is not None:
                offer = self._offers.get(process)
                if offer is not None and offer.offer == number:
                    self._observers.loaded(program, offer.source, _stamp(offer))
            case BeginMesh(mesh):
                self._observers.formed(self._machine, mesh)

    def _heard(self, process: Process, message: Any) -> None:
        program = self._programs.get(process)
        if program is None:
            return
        match message:
            case StateOffered():
                self._offers[process] = message
            case TrainingPermitted(epoch, number):
                offer = self._offers.get(process)
                if offer is not None and offer.offer == number and self._begins(program, epoch):
                    self._observers.went(program, offer.source, _stamp(offer), epoch)

    def _begins(self, program: Program, epoch: int) -> bool:
        """Whether the rank takes this as the beginning of that epoch: it may hear of it twice, or
        late."""
        is_heeded = program.rank is not None and program.rank.epoch == epoch
        begins = is_heeded and self._epochs.get(program.process) != epoch
        if begins:
            self._epochs[program.process] = epoch
        return begins

    def _put(self, process: Process, path: str, view: memoryview, at: int, data: bytes) -> None:
        program = self._programs.get(process)
        if program is None or program.rank is None or "/slot-" not in path:
            return
        before = _header(view, path)
        after = _header(data, path)
        if after is not None and after.state is SlotState.SEALED:
            self._observers.sealed(program, after.stamp)
        elif (
            before is not None
            and before.state is SlotState.SEALED
            and program.rank.stage is Stage.READY
        ):
            self._observers.overwrites(program, before.stamp)


def _header(page: memoryview | bytes, path: str) -> SlotHeader | None:
    try:
        return parse_page(bytes(page[:PAGE_BYTES]), Path(path))
    except DamageError:
        return None


def _stamp(offer: StateOffered) -> Stamp:
    return Stamp(offer.step, offer.epoch)
