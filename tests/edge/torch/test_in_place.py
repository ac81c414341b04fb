"""In place: a restore into a process that stays gives nothing a new address and makes nothing
beside what is there; what has no place comes back all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from keepstep.edge.torch import restore
from keepstep.edge.torch.in_place import fill, takes
from keepstep.edge.torch.state import Protected

Room = Any  # conftest's

KINDS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class Training:
    def __init__(self, kind: Any, dtype: torch.dtype = torch.float32) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(dtype)
        self.optimizer = kind(self.model.parameters())
        self.protected = Protected.of({"model": self.model, "optimizer": self.optimizer}, lazy=True)

    def step(self) -> Training:
        dtype = next(self.model.parameters()).dtype
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 4, dtype=dtype)).float().square().sum().backward()
        self.optimizer.step()
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        return {i.spec.name: i.local for i in self.protected.gather().items if i.spec.nbytes}

    def addresses(self) -> dict[str, int]:
        """But for random states, which torch gives out as copies."""
        found = self.tensors().items()
        return {name: t.data_ptr() for name, t in found if not name.startswith("rng")}

    def objects(self) -> list[int]:
        return [id(v) for s in self.optimizer.state.values() for v in s.values()]


@each_kind
def test_nothing_gets_a_new_address(room: Room, snapshot_bytes: Any, kind: Any) -> None:
    training = Training(kind).step()
    room.save_from(training.protected)
    expected = snapshot_bytes(training.tensors())
    training.step().step()
    addresses, objects = training.addresses(), training.objects()
    assert snapshot_bytes(training.tensors()) != expected
    room.load_into(training.protected)
    assert snapshot_bytes(training.tensors()) == expected
    assert training.addresses() == addresses and training.objects() == objects


@each_kind
def test_nothing_is_copied_beside_what_is_there(
    room: Room, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(kind).step()
    room.save_from(training.protected)
    copied: list[str] = []
    clone = restore.clone

    def told(slot: Any, segment: Any) -> torch.Tensor:
        copied.append(segment.spec.name)
        return clone(slot, segment)

    monkeypatch.setattr(restore, "clone", told)
    room.load_into(training.protected)
    assert copied and all(name.startswith("rng.") for name in copied)
    layout = training.protected.gather().layout
    private = sum(s.spec.nbytes for s in layout.segments if s.spec.name.startswith("rng."))
    assert restore.private_bytes(training.protected, layout) == private


@each_kind
def test_a_process_that_has_just_begun_gets_memory_of_its_own(
    room: Room, snapshot_bytes: Any, kind: Any
) -> None:
    training = Training(kind).step()
    room.save_from(training.protected)
    expected = snapshot_bytes(training.tensors())
    fresh = Training(kind)
    room.load_into(fresh.protected)
    assert snapshot_bytes(fresh.tensors()) == expected
    room.slot.payload[:] = bytes(len(room.slot.payload))  # nothing looks into the slot any more
    assert snapshot_bytes(fresh.tensors()) == expected


def test_state_of_another_type_than_its_parameter_keeps_its_bits(
    room: Room, snapshot_bytes: Any
) -> None:
    """torch's optimizers cast what they load to the parameter's type."""
    training = Training(KINDS["momentum"], torch.bfloat16).step()
    for state in training.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].float() / 3
    room.save_from(training.protected)
    expected, addresses = snapshot_bytes(training.tensors()), training.addresses()
    for state in training.optimizer.state.values():
        state["momentum_buffer"].zero_()
    room.load_into(training.protected)
    assert snapshot_bytes(training.tensors()) == expected
    assert training.addresses() == addresses


def test_what_has_another_shape_than_the_saved_one_is_replaced(
    room: Room, snapshot_bytes: Any
) -> None:
    training = Training(KINDS["adamw"]).step()
    room.save_from(training.protected)
    expected = snapshot_bytes(training.tensors())
    for state in training.optimizer.state.values():
        state["exp_avg"] = torch.zeros(3)
        del state["exp_avg_sq"]
    room.load_into(training.protected)
    assert snapshot_bytes(training.tensors()) == expected


def test_a_value_that_shares_an_optimizer_s_tensor_still_shares_it(room: Room) -> None:
    training = Training(KINDS["adamw"]).step()
    weight = training.model[0].weight
    mine = {"average": training.optimizer.state[weight]["exp_avg"]}
    room.save(model=training.model, optimizer=training.optimizer, mine=mine)
    training.step()
    protected = room.load(model=training.model, optimizer=training.optimizer, mine=mine)
    found = protected.values["mine"]["average"]
    assert found.data_ptr() == training.optimizer.state[weight]["exp_avg"].data_ptr()


class Odd(torch.optim.SGD):
    """Keeps what it is given somewhere else, too."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.mine = [v for s in state_dict["state"].values() for v in s.values()]


def test_an_optimizer_of_the_program_s_own_is_given_copies(room: Room, snapshot_bytes: Any) -> None:
    training = Training(lambda p: Odd(p, 0.1, momentum=0.9)).step()
    room.save_from(training.protected)
    training.step()
    room.load_into(training.protected)
    expected = snapshot_bytes(training.optimizer.mine)
    room.slot.payload[:] = bytes(len(room.slot.payload))
    assert snapshot_bytes(training.optimizer.mine) == expected


def test_versions_of_a_module_s_state_are_handed_on(room: Room) -> None:
    seen: list[Any] = []

    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *rest: Any) -> None:
            seen.append(local.get("version"))
            super()._load_from_state_dict(state, prefix, local, *rest)

    model = Versioned(2, 2)
    room.save(model=model)
    room.load(model=model)
    assert seen == [7]


@pytest.mark.parametrize(
    ("live", "saved"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(1).expand(4), torch.zeros(4)),
        (torch.zeros(2).to_sparse(), torch.zeros(2).to_sparse()),
        (torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2, dtype=torch.complex64)),
        (None, torch.zeros(2)),
        (torch.zeros(2), 3),
    ],
    ids=["shape", "type", "expanded", "sparse", "conjugated", "none", "a number"],
)
def test_what_does_not_take_bytes_as_they_are(live: Any, saved: Any) -> None:
    assert not takes(live, saved)


def test_a_tensor_of_other_strides_takes_the_values() -> None:
    live, saved = torch.zeros(3, 4).t(), torch.arange(12.0).view(4, 3)
    assert takes(live, saved)
    fill([(live, saved), (saved, saved)])
    assert torch.equal(live, saved)
