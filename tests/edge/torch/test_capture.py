"""Capture: what stands still is copied later and in time, what moves is copied at once, and a torn
copy never counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from keepstep.coding.checksum import block_checksums
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch import restore
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.numbers.copied import KnownBad
from keepstep.edge.torch.plan import CopyShare
from keepstep.edge.torch.state import Protected, State
from keepstep.edge.torch.views import write
from keepstep.model.numbers import NotFinite
from keepstep.model.units import KIB, MIB

Bytes = Callable[[Any], Any]
Room = Any  # conftest's


class Training:
    """A small network in the middle of training, with a boundary just behind it."""

    def __init__(self, fused: bool = False) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1, fused=fused)
        self.protected = Protected.of({"model": self.model, "optimizer": self.optimizer}, lazy=True)
        self.step()

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 4)).square().sum().backward()

    def step(self) -> None:
        self.forward_and_backward()
        self.optimizer.step()

    def state(self) -> list[Any]:
        return [self.model.state_dict(), self.optimizer.state_dict()]


def saved(room: Room) -> list[Any]:
    """The state in the sealed slot, read as a stranger does."""
    reader = Training()
    header, layout = room.slot.verify()
    tree = restore.open_snapshot(reader.protected, room.slot, header, layout).tree
    return [tree["model"], tree["optimizer"]]


def test_a_copy_is_equal_to_nothing_but_itself(room: Room) -> None:
    """Its tensors raise where one asks whether they are equal. Seen on a device: the third step
    ended so."""
    one, other = (TensorCopy(Training().protected.gather(), room.slot) for _ in range(2))
    assert one != other and one == one and len({one, other}) == 2


def test_forward_and_backward_before_the_copy_change_nothing(
    room: Room, snapshot_bytes: Bytes
) -> None:
    """BatchNorm's statistics move in forward: they were copied at the boundary. Parameters did not
    move: they are copied now."""
    training = Training()
    expected = snapshot_bytes(training.state())
    copy = room.begin(training.protected.gather())
    training.forward_and_backward()
    assert snapshot_bytes(training.state()) != expected, "the running statistics have moved"
    run_acts(copy.copy_still())
    assert copy.moved == []
    room.seal(copy)
    assert snapshot_bytes(saved(room)) == expected


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (lambda t: t.model[2].weight.detach()[0, 1].fill_(float("nan")), "model.2.weight"),
        (lambda t: t.optimizer.state[t.model[0].bias]["exp_avg"][1].fill_(float("inf")), "exp_avg"),
    ],
)
def test_a_copy_tells_what_of_it_is_not_finite(
    room: Room, plant: Callable[[Training], Any], name: str
) -> None:
    training, known = Training(), KnownBad()

    def copied() -> list[str]:
        copy = room.begin(training.protected.gather(), known_bad=known)
        run_acts(copy.copy_still())
        return list(copy.not_finite().names)

    assert copied() == []
    plant(training)
    [found] = copied()
    assert name in found


def test_what_lies_between_tensors_is_nobodys(room: Room) -> None:
    """A gap may hold anything: it was another state's, or nobody's."""
    training, known = Training(), KnownBad()
    state = training.protected.gather()
    copy = room.begin(state, known_bad=known)
    copy.slot.payload[:] = b"\xff" * len(copy.slot.payload)  # NaN, in any float
    run_acts(copy.copy_still())
    assert not copy.not_finite()


def test_what_was_not_finite_before_the_first_step_is_no_news(room: Room) -> None:
    training, known = Training(), KnownBad()
    training.model[0].weight.detach()[0, 0] = -float("inf")  # a mask, say
    assert known.learn(training.protected.gather().items)
    for _ in range(2):
        copy = room.begin(training.protected.gather(), known_bad=known)
        run_acts(copy.copy_still())
        assert not copy.not_finite()
    copy = room.begin(training.protected.gather())
    run_acts(copy.copy_still())
    assert not copy.not_finite(), "nobody asked"


def test_what_the_first_copy_of_a_life_holds_is_news(room: Room) -> None:
    """A training that went on from good bytes, and whose first step was bad."""
    training, known = Training(), KnownBad()
    assert not known.learn(training.protected.gather().items)
    training.model[0].weight.detach()[0, 0] = float("nan")
    copy = room.begin(training.protected.gather(), known_bad=known)
    run_acts(copy.copy_still())
    assert copy.not_finite() == NotFinite(("model.0.weight",))


def test_lazy_bytes_are_not_there_before_the_copy(room: Room) -> None:
    training = Training()
    copy = room.begin(training.protected.gather())
    zeros = [
        s.spec.name
        for s in copy.state.layout.segments
        if not any(room.slot.payload[s.offset : s.end])
    ]
    lazy = {i.spec.name for i in copy.state.items if i.lazy}
    assert lazy == set(zeros) and len(lazy) == 6 + 3 * 6
    run_acts(copy.copy_still())
    copied = [
        s
        for s in copy.state.layout.segments
        if s.spec.name in lazy and any(room.slot.payload[s.offset : s.end])
    ]
    assert len(copied) == len(lazy)
    assert copy.copied_bytes == sum(s.spec.nbytes for s in copy.state.layout.segments)


@pytest.mark.parametrize("fused", [False, True])
def test_the_update_waits_for_the_copy(room: Room, snapshot_bytes: Bytes, fused: bool) -> None:
    """The capture thread does not begin before the trainer is at the fence; still none of the
    update is in the snapshot.

    Fused updates leave the version counters as they are, so that this fence is all that guards
    them.
    """
    training = Training(fused)
    expected = snapshot_bytes(training.state())
    copy = room.begin(training.protected.gather())
    at_fence, order = threading.Event(), []

    def capture() -> None:
        at_fence.wait()
        order.append("copy begins")
        run_acts(copy.copy_still())

    def hook(*_: Any) -> None:
        at_fence.set()
        copy.fence()
        order.append("the update begins" if copy.done.is_set() else "the update did not wait")

    training.optimizer.register_step_pre_hook(hook)
    thread = threading.Thread(target=capture)
    thread.start()
    training.step()
    thread.join()
    assert order == ["copy begins", "the update begins"]
    assert copy.moved == []
    room.seal(copy)
    assert snapshot_bytes(saved(room)) == expected != snapshot_bytes(training.state())


def test_without_the_fence_the_update_tears_the_copy(room: Room) -> None:
    """What the fence is for: version counters would see an unfenced update (of an optimizer that is
    not fused)."""
    training = Training()
    copy = room.begin(training.protected.gather())
    training.step()
    run_acts(copy.copy_still())
    run_acts(copy.settle())
    lazy = {i.spec.name for i in copy.state.items if i.lazy}
    assert set(copy.moved) == lazy


def test_fused_updates_leave_version_counters_alone() -> None:
    """Measured, not hoped: the reason why the hook is the proof that counts. Should torch change
    it, nothing breaks."""
    training = Training(fused=True)
    training.forward_and_backward()
    parameter = training.model[0].weight
    before, version = parameter.clone(), parameter._version
    training.optimizer.step()
    assert not torch.equal(parameter, before)
    assert parameter._version == version


def test_a_change_between_boundary_and_copy_is_detected_and_named(room: Room) -> None:
    training = Training()
    copy = room.begin(training.protected.gather())
    with torch.no_grad():
        training.model[0].weight.mul_(0.5)
        training.optimizer.state[training.model[2].bias]["exp_avg"].add_(1)
    run_acts(copy.copy_still())
    copy.fence()
    assert copy.moved == ["model.0.weight", "optimizer.state.5.exp_avg"]


def test_a_change_during_the_copy_is_detected(room: Room) -> None:
    """Between the first and the last tensor's bytes."""
    training = Training()
    state = training.protected.gather()
    copy = room.begin(state)

    written = copy._write_hashed

    def write_and_change(shares: Any) -> None:
        pairs = [pair for share in shares for pair in share.pairs]
        written([CopyShare.of(pairs[:3])])
        with torch.no_grad():
            training.model[0].weight.zero_()
        written([CopyShare.of(pairs[3:])])

    copy._write_hashed = write_and_change  # type: ignore[method-assign]
    run_acts(copy.copy_still())
    run_acts(copy.settle())
    assert copy.moved == ["model.0.weight"]


def test_a_change_after_the_fence_is_no_matter(room: Room, snapshot_bytes: Bytes) -> None:
    training = Training()
    expected = snapshot_bytes(training.state())
    copy = room.begin(training.protected.gather())
    run_acts(copy.copy_still())
    copy.fence()
    with torch.no_grad():
        training.model[0].weight.zero_()
        training.model[1].running_mean.zero_()
    assert copy.moved == []
    room.seal(copy)
    assert snapshot_bytes(saved(room)) == expected


def test_an_operation_that_ends_behind_the_copy_tears_it(room: Room) -> None:
    """torch raises the counter when the kernel has ended: the copy may have ended before that."""
    training = Training()
    copy = room.begin(training.protected.gather())
    run_acts(copy.copy_still())
    torch.autograd.graph.increment_version(training.model[0].weight)
    copy.fence()
    assert copy.moved == ["model.0.weight"]


def test_an_operation_after_one_that_has_ended_behind_the_copy_tears_nothing(room: Room) -> None:
    """Once the thread was seen elsewhere, all that could have been under way is over."""
    training = Training()
    copy = room.begin(training.protected.gather())
    run_acts(copy.copy_still())
    run_acts(copy.settle())
    torch.autograd.graph.increment_version(training.model[0].weight)
    copy.fence()
    assert copy.moved == []


def test_what_is_sealed_under_a_large_operation_is_one_moment(room: Room) -> None:
    weight = torch.nn.Parameter(torch.ones(16 * MIB))
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(3):
        protected = Protected.of({"weight": weight, "optimizer": optimizer}, lazy=True)
        before = weight[0].item()
        copy = room.begin(protected.gather())

        def capture(copy: Any = copy) -> None:
            run_acts(copy.copy_still())
            run_acts(copy.settle())

        thread = threading.Thread(target=capture)
        thread.start()
        with torch.no_grad():
            weight.mul_(1.5)
        thread.join()
        copied = room.slot.payload[: weight.nbytes].cast("f")
        values = torch.frombuffer(copied, dtype=torch.float32)
        assert copy.moved == ["weight"] or bool((values == before).all())
        del values, copied


def test_what_no_counter_sees_is_found_in_the_end_and_named(room: Room) -> None:
    training = Training()
    found: list[str] = []
    for turn in range(10):
        copy = room.begin(training.protected.gather(), turn)
        run_acts(copy.copy_still())
        run_acts(copy.settle())
        training.model[2].weight.data.mul_(0.5)
        copy.fence()
        found += copy.moved
    assert set(found) == {"model.2.weight"}


def test_what_moves_behind_the_fence_is_not_looked_at(room: Room) -> None:
    training = Training(fused=True)
    for turn in range(10):
        copy = room.begin(training.protected.gather(), turn)

        def hook(*_: Any, copy: Any = copy) -> None:
            copy.fence()

        training.optimizer.register_step_pre_hook(hook)
        run_acts(copy.copy_still())
        training.step()
        copy.passed()
        assert copy.moved == []


def test_torn_once_eager_from_then_on(room: Room, snapshot_bytes: Bytes) -> None:
    training = Training()
    training.protected.eager_names.add("model.0.weight")
    expected = snapshot_bytes(training.state())
    copy = room.begin(training.protected.gather())
    with torch.no_grad():
        training.model[0].weight.zero_()
    run_acts(copy.copy_still())
    assert copy.moved == []
    room.seal(copy)
    assert snapshot_bytes(saved(room)) == expected


SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 5), (8, 8), (64,), (1100,), (70, 70)]
SOME = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)


class Many(nn.Module):
    """Tensors of many shapes: parameters in both orders of memory, one under two names, and buffers
    of other types between them."""

    def __init__(self, shapes: list[tuple[int, ...]], has_buffers: bool) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            data = torch.randn(shape)
            turned = number % 3 == 2 and data.dim() == 2
            self.register_parameter(f"p{number}", nn.Parameter(data.t() if turned else data))
            if has_buffers and number % 4 == 3:
                self.register_buffer(f"b{number}", torch.arange(number, dtype=torch.int16))
        self.last = getattr(self, f"p{len(shapes) - 1}")


def trained(shapes: list[tuple[int, ...]], has_buffers: bool) -> State:
    """With all that an optimizer keeps of each."""
    model = Many(shapes, has_buffers)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return Protected.of({"model": model, "optimizer": optimizer}, lazy=True).gather()


@SOME
@given(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=40), st.booleans())
def test_all_at_once_is_what_tensor_by_tensor_is(
    room: Room, tmp_path: Path, shapes: list[tuple[int, ...]], has_buffers: bool
) -> None:
    state = trained(shapes, has_buffers)
    copy = room.begin(state)
    run_acts(copy.copy_still())
    run_acts(copy.settle())
    assert copy.moved == []
    slow = Slot.create(MEMORY, tmp_path / "slow", state.payload_bytes, 64 * KIB)
    for item, segment in zip(state.items, state.layout.segments, strict=True):
        write(slow, segment, item.local)
    for segment in state.layout.segments:
        found, expected = (
            bytes(slot.payload[segment.offset : segment.end]) for slot in (room.slot, slow)
        )
        assert found == expected, segment.spec
    payload = room.slot.payload[: state.payload_bytes]
    is_hashed = all(item.address or not item.local.numel() for item in state.items)
    assert copy.sums == (dict(enumerate(block_checksums(payload))) if is_hashed else {})
    del payload
    slow.close()


@SOME
@given(st.lists(st.sampled_from(SHAPES[2:]), min_size=1, max_size=40), st.data())
def test_each_tensor_among_many_is_named_when_it_moves(
    room: Room, shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    state = trained(shapes, has_buffers=True)
    copy = room.begin(state)
    lazy = [item for item in state.items if item.lazy]
    assert len(lazy) == 4 * len(shapes)
    moved = data.draw(st.lists(st.sampled_from(range(len(lazy))), max_size=3, unique=True))
    is_late = data.draw(st.booleans())
    if is_late:
        run_acts(copy.copy_still())
    with torch.no_grad():
        for index in moved:
            lazy[index].local.add_(1)
    if not is_late:
        run_acts(copy.copy_still())
    copy.fence()
    assert sorted(copy.moved) == sorted(lazy[index].spec.name for index in moved)


def test_a_counter_is_that_of_the_moment_it_was_gathered(room: Room) -> None:
    """What moves between that and the copy's beginning has moved; what moved before has not."""
    training = Training()
    training.protected.gather()
    training.step()
    state = training.protected.gather()
    with torch.no_grad():
        training.model[2].weight.zero_()
    copy = room.begin(state)
    run_acts(copy.copy_still())
    copy.fence()
    assert copy.moved == ["model.2.weight"]


def test_a_second_tensor_over_the_same_bytes_has_a_counter_of_its_own(room: Room) -> None:
    """`.data` makes such a one: its operations do not show in the first one's counter."""
    weight = nn.Parameter(torch.ones(3))
    other = nn.Parameter(weight.data)
    optimizer = torch.optim.SGD([weight, other], 0.1)
    protected = Protected.of({"weight": weight, "other": other, "optimizer": optimizer}, lazy=True)
    copy = room.begin(protected.gather())
    version = weight._version
    with torch.no_grad():
        other.mul_(2)
    assert weight._version == version
    run_acts(copy.copy_still())
    run_acts(copy.settle())
    assert copy.moved == ["weight"]


@pytest.mark.parametrize("is_awaited", [False, True])
def test_what_is_copied_is_hashed_at_once_unless_the_update_waits(
    room: Room, snapshot_bytes: Bytes, is_awaited: bool
) -> None:
    training = Training()
    state = training.protected.gather()
    expected = snapshot_bytes(training.state())
    copy = room.begin(state)
    update = threading.Thread(target=copy.fence)
    if is_awaited:
        update.start()
        assert copy._is_awaited.wait(60)
    run_acts(copy.copy_still())
    if is_awaited:
        update.join()
    assert set(copy.sums) == (set() if is_awaited else {0})
    room.seal(copy)
    assert snapshot_bytes(saved(room)) == expected


def test_a_copy_that_fails_lets_the_trainer_go(room: Room) -> None:
    training = Training()
    copy = room.begin(training.protected.gather())

    def fail(_: Any) -> None:
        raise RuntimeError("the driver is gone")

    copy._write_hashed = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="the driver is gone"):
        run_acts(copy.copy_still())
    assert copy.done.is_set()
    copy.fence()


def test_python_values_are_taken_at_the_boundary(room: Room) -> None:
    log = ["a"]
    protected = Protected.of({"log": log, "x": torch.ones(1)}, lazy=True)
    copy = room.begin(protected.gather())
    log.append("b")
    run_acts(copy.copy_still())
    room.seal(copy)
    header, layout = room.slot.verify()
    assert restore.open_snapshot(protected, room.slot, header, layout).tree["log"] == ["a"]


def test_an_operation_on_a_dtensor_tears_its_local_part(room: Room) -> None:
    """The local part's own counter stands still then (measured, torch 2.13)."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([weight], 0.1)
        protected = Protected.of({"weight": weight, "optimizer": optimizer}, lazy=True)
        copy = room.begin(protected.gather())
        with torch.no_grad():
            weight.mul_(2)
        run_acts(copy.copy_still())
        run_acts(copy.settle())
        assert copy.moved == ["weight"]
    finally:
        dist.destroy_process_group()
