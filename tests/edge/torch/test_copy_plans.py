"""What is worked out for a slot once, and when it is worked out anew. Tensors of the meta device
stand for those of a device: nothing is copied here."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.copy_plans import CopyPlans
from keepstep.edge.torch.copy_stream import CopyStream
from keepstep.edge.torch.device_copy import Bucket
from keepstep.edge.torch.plan import CopyOrder
from keepstep.edge.torch.tree import StateItem
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.units import KIB, MIB
from tests.edge.torch.fake_device import FakeDevice

DEVICE = torch.device("meta")


def item(name: str, tensor: torch.Tensor) -> StateItem:
    spec = TensorSpec(name, "float32", tuple(tensor.shape), 4 * tensor.numel())
    address = None if tensor.device == DEVICE else tensor.data_ptr()
    return StateItem(spec, tensor, lazy=False, address=address)


class Boundary:
    """A plan of the state that lasts, and what each gather finds beside it."""

    def __init__(self, home: Path) -> None:
        device = FakeDevice(random.Random(0).randrange)
        self.plans = CopyPlans({DEVICE: CopyStream(DEVICE, device, device)})
        self.weight = item("weight", torch.zeros(3000, device=DEVICE))
        self.lasting = self._order([self.weight], first=0)
        self.slot = Slot.create(MEMORY, home / "slot", MIB, 16 * KIB)

    def _order(self, items: list[StateItem], first: int) -> CopyOrder:
        segments = lay_out([self.weight.spec, *(i.spec for i in items)]).segments
        return CopyOrder.of(items, segments[first : first + len(items)])

    def buckets(self, *beside: torch.Tensor, payload_bytes: int = MIB) -> list[Bucket]:
        others = self._order([item(f"other{i}", t) for i, t in enumerate(beside)], first=1)
        return list(self.plans.of(self.slot, (self.lasting, others), payload_bytes)._buckets)


def host() -> torch.Tensor:
    return torch.zeros(100)


def there() -> torch.Tensor:
    return torch.zeros(100, device=DEVICE)


def are_the_same(one: list[Bucket], other: list[Bucket]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def test_random_states_of_the_host_are_other_tensors_each_time_and_nothing_is_cut_anew(
    tmp_path: Path,
) -> None:
    boundary = Boundary(tmp_path)
    kept = [host()]  # the next one lies elsewhere
    first = boundary.buckets(kept[0])
    kept.append(host())
    assert kept[0].data_ptr() != kept[1].data_ptr()
    assert are_the_same(first, boundary.buckets(kept[1]))
    boundary.slot.close()


@pytest.mark.parametrize(
    "changed",
    [
        lambda boundary: boundary.buckets(torch.zeros(200)),
        lambda boundary: boundary.buckets(host(), host()),
        lambda boundary: boundary.buckets(there()),
        lambda boundary: boundary.buckets(host(), payload_bytes=100 * MIB),
    ],
    ids=["longer", "one more", "on the device", "more behind it"],
)
def test_what_goes_elsewhere_is_cut_anew(
    tmp_path: Path, changed: Callable[[Boundary], list[Bucket]]
) -> None:
    boundary = Boundary(tmp_path)
    assert not are_the_same(boundary.buckets(host()), changed(boundary))
    boundary.slot.close()


def test_a_tensor_that_lies_elsewhere_on_the_device_is_cut_anew(tmp_path: Path) -> None:
    boundary = Boundary(tmp_path)
    tensor = there()
    first = boundary.buckets(tensor)
    assert are_the_same(first, boundary.buckets(tensor))
    assert not are_the_same(first, boundary.buckets(tensor.view(10, 10)))
    boundary.slot.close()
