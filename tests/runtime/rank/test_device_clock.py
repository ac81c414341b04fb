"""The device clock: each section has the device's time in it, however far the device is behind, and
what it waits for others is left out. On a fake device whose kernels take seconds of its own time,
and an operation of it next to nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.torch.device_marks import CudaMarks, device_marks
from keepstep.edge.torch.groups import TorchGroup
from keepstep.edge.torch.membership import Membership
from keepstep.model.step_work import NONE_NS, Section, StepWork
from keepstep.model.units import S_NS
from keepstep.runtime.rank.device_clock import MOST_MARKS, DeviceClock
from keepstep.runtime.rank.step_clock import NO_PASS, StepClock
from tests.edge.torch.fake_device import FakeDevice, FakeNccl


class OnDevice:
    """A trainer that orders kernels, its clocks, and its device, which comes by when it is told to
    or, with `draw`, when that wants it to."""

    def __init__(self, draw: random.Random | None = None) -> None:
        self.draw = draw
        self.device = FakeDevice((draw or random.Random(0)).randrange)
        self.written: list[StepWork] = []
        self.clock = DeviceClock(CudaMarks(self.device), self.written.append)
        self.host = StepClock(
            lambda: 0, lambda: 0, lambda: 0, self.clock.step_ended, device=self.clock
        )

    def computes(self, seconds: int) -> None:
        def kernel() -> None:
            self.device.now_ns += seconds * S_NS

        self.device.current.order(kernel)
        for _ in range(0 if self.draw is None else self.draw.randrange(8)):
            self.device.run_one()

    def ends(self, step: int) -> None:
        self.host.step_ended(step, 1, 0)

    def told(self) -> list[dict[Section, int]]:
        """Once the device has come by, and the trainer for another time."""
        self.device.synchronize()
        self.ends(10**6)
        return [_seconds(work) for work in self.written]


def _seconds(work: StepWork) -> dict[Section, int]:
    return {s: round(work.device_ns[s] / S_NS) for s in Section if work.device_ns[s] > S_NS / 2}


def a_step(rank: OnDevice, step: int) -> None:
    rank.host.step_begun()
    rank.computes(1)
    rank.host.body_entered()
    rank.computes(20)
    rank.host.enter(Section.HOOK)
    rank.computes(3)
    rank.host.enter(Section.UPDATE)
    rank.computes(4)
    rank.host.enter(Section.COMPUTE)
    rank.ends(step)


USUAL = {Section.DATA: 1, Section.COMPUTE: 20, Section.HOOK: 3, Section.UPDATE: 4}


def test_each_section_has_the_device_s_time_in_it() -> None:
    rank = OnDevice()
    a_step(rank, 0)
    assert rank.written == [], "the device has done nothing yet"
    assert rank.told() == [USUAL]
    assert rank.written[0].step == 0


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_the_sums_are_those_of_the_step_however_far_the_device_is_behind(
    seed: int, steps: int
) -> None:
    rank = OnDevice(random.Random(seed))
    for step in range(steps):
        a_step(rank, step)
    sums = [{s: n * (step + 1) for s, n in USUAL.items()} for step in range(steps)]
    assert rank.told() == sums
    assert [work.step for work in rank.written] == list(range(steps))


def test_a_body_that_does_not_say_when_it_begins_began_with_the_step() -> None:
    rank = OnDevice()
    rank.host.step_begun()
    rank.computes(7)
    rank.device.synchronize()
    rank.ends(0)
    assert rank.told() == [{Section.COMPUTE: 7}]


def test_what_the_trainer_waits_in_a_collective_is_left_out() -> None:
    rank = OnDevice()
    rank.host.body_entered()
    rank.computes(5)
    rank.clock.waits(True)
    rank.clock.waits(True)  # a wait that waits
    rank.computes(100)
    rank.clock.waits(False)
    rank.computes(100)
    rank.clock.waits(False)
    rank.computes(6)
    rank.ends(0)
    assert rank.told() == [{Section.COMPUTE: 11}]
    assert round(rank.clock.wait_ns / S_NS) == 200


def test_passes_are_marked_on_the_device_wherever_their_gradients_are_computed() -> None:
    rank = OnDevice()
    host = rank.host
    host.body_entered()
    rank.computes(1)
    for _ in range(2):
        before = host.forward_begun()
        rank.computes(10)
        host.forward_ended(before)
        rank.computes(2)
        on_another(host.backward_begun)
        rank.computes(20)
        on_another(host.backward_ended)
        rank.computes(3)  # as DistributedDataParallel waits for what it reduces
    rank.ends(0)
    body = 1 + 2 * (10 + 2 + 20 + 3)
    told = {Section.COMPUTE: body, Section.FORWARD: 20, Section.BACKWARD: 40}
    assert rank.told() == [told]


def test_what_is_waited_in_a_pass_of_the_device_is_not_of_it() -> None:
    rank = OnDevice()
    rank.host.body_entered()
    before = rank.host.forward_begun()
    rank.computes(5)
    rank.clock.waits(True)
    rank.computes(100)
    rank.clock.waits(False)
    rank.computes(6)
    rank.host.forward_ended(before)
    rank.ends(0)
    assert rank.told() == [{Section.COMPUTE: 11, Section.FORWARD: 11}]


def on_another(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


class Foreign(OnDevice):
    """With groups that are torch's own: waits are not seen, and collectives are counted."""

    def __init__(self, knows: bool = True) -> None:
        super().__init__()
        self.entered = 7
        self.host = StepClock(
            *(lambda: 0, lambda: 0, lambda: 0, self.clock.step_ended),
            sees_collectives=False,
            device=self.clock,
            entered=lambda: self.entered if knows else None,
        )

    def passes(self, forward: int, backward: int) -> None:
        """Seconds; below 0, with a collective in it."""
        for pass_, seconds in ((Section.FORWARD, forward), (Section.BACKWARD, backward)):
            before = NO_PASS
            if pass_ is Section.FORWARD:
                before = self.host.forward_begun()
            else:
                self.host.backward_begun()
            self.entered += seconds < 0
            self.computes(abs(seconds))
            if pass_ is Section.FORWARD:
                self.host.forward_ended(before)
            else:
                self.host.backward_ended()

    def updates(self) -> None:
        self.host.enter(Section.HOOK)
        self.host.enter(Section.UPDATE)
        self.computes(4)
        self.host.enter(Section.COMPUTE)


@pytest.mark.parametrize(
    ("forward", "backward", "known"),
    [
        (10, 20, {Section.FORWARD: 10, Section.BACKWARD: 20}),
        (10, -20, {Section.FORWARD: 10}),
        (-10, 20, {}),  # its end may be waited for in the backward pass
    ],
)
def test_where_waits_are_not_seen_a_pass_counts_without_a_collective_before_its_end(
    forward: int, backward: int, known: dict[Section, int]
) -> None:
    rank = Foreign()
    for step in range(2):
        rank.host.body_entered()
        rank.passes(forward, backward)
        rank.entered += 3  # gradients are summed, and waited for
        rank.updates()
        rank.ends(step)
    twice = {section: 2 * seconds for section, seconds in known.items()}
    assert rank.told()[1] == {Section.COMPUTE: 60, Section.UPDATE: 8, **twice}


def test_what_was_entered_in_an_update_may_be_waited_for_in_the_next_pass() -> None:
    rank = Foreign()
    rank.host.body_entered()
    rank.passes(1, 1)
    rank.host.enter(Section.UPDATE)
    rank.entered += 1  # parameters are gathered
    rank.host.enter(Section.COMPUTE)
    rank.passes(10, 20)
    rank.ends(0)
    assert rank.told() == [{Section.COMPUTE: 32, Section.FORWARD: 1, Section.BACKWARD: 1}]


def test_of_micro_batches_those_before_the_first_collective_count() -> None:
    rank = Foreign()
    rank.host.body_entered()
    rank.passes(10, 20)  # no_sync
    rank.passes(10, -20)
    rank.ends(0)
    assert rank.told() == [{Section.COMPUTE: 60, Section.FORWARD: 20, Section.BACKWARD: 20}]


def test_where_nobody_counts_collectives_no_pass_is_known() -> None:
    rank = Foreign(knows=False)
    rank.host.body_entered()
    rank.passes(10, 20)
    rank.ends(0)
    assert rank.told() == [{Section.COMPUTE: 30}]


def test_another_thread_that_waits_does_not_stop_the_trainer_s_clock() -> None:
    rank = OnDevice()
    rank.host.body_entered()
    thread = threading.Thread(target=rank.clock.waits, args=(True,))
    thread.start()
    thread.join()
    rank.computes(9)
    rank.ends(0)
    assert rank.told() == [{Section.COMPUTE: 9}]


def test_marks_are_used_again_and_no_more_are_made_for_a_device_that_stands_still() -> None:
    rank, made = OnDevice(), []
    event = rank.device.Event
    rank.device.Event = lambda **how: made.append(1) or event()  # type: ignore[method-assign,func-returns-value]
    for step in range(100):
        a_step(rank, step)
        rank.device.synchronize()
    assert len(made) < 20
    for step in range(100, 2000):
        a_step(rank, step)
    assert len(made) <= MOST_MARKS
    for step in (2000, 2001, 2002):
        rank.device.synchronize()
        rank.ends(step)
    assert sum(_seconds(rank.written[-1]).values()) == 2000 * sum(USUAL.values()), "none is lost"
    assert [work.step for work in rank.written] == list(range(2002))


def test_in_a_graph_s_capture_nothing_is_marked() -> None:
    rank = OnDevice()
    rank.host.body_entered()
    rank.device.is_capturing = True
    ordered = len(rank.device.current.ops)
    rank.host.enter(Section.UPDATE)
    rank.host.enter(Section.COMPUTE)
    assert len(rank.device.current.ops) == ordered
    rank.device.is_capturing = False
    rank.computes(3)
    rank.ends(0)
    assert rank.told() == [{Section.COMPUTE: 3}]


def test_a_pass_whose_end_cannot_be_marked_is_not_known() -> None:
    rank = OnDevice()
    rank.host.body_entered()
    before = rank.host.forward_begun()
    rank.computes(5)
    rank.device.is_capturing = True
    rank.host.forward_ended(before)
    rank.device.is_capturing = False
    rank.computes(50)
    rank.ends(0)
    assert rank.told() == [{Section.COMPUTE: 55}]


@pytest.mark.parametrize("what", ["make", "is_over", "between_ns"])
def test_a_device_that_has_failed_is_not_ours_to_tell(what: str) -> None:
    rank = OnDevice()

    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    a_step(rank, 0)
    rank.device.synchronize()
    setattr(rank.clock._marks, what, fails)
    a_step(rank, 1)
    rank.clock.close()
    assert rank.written == []


def test_where_the_program_uses_no_device_there_are_no_marks() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        pytest.skip("it does here")
    assert device_marks() is None


class WithPeer(OnDevice):
    """Over NCCL, with a peer that comes late."""

    def __init__(self, late_s: int) -> None:
        super().__init__()
        self.nccl = FakeNccl(self.device)
        self.members = Membership()
        self.members.device = torch.device("cpu")  # stands for the device
        self.members.on_wait = self.clock.waits
        self.group = TorchGroup(
            dist.HashStore(),
            0,
            2,
            timedelta(seconds=10),
            "g",
            self.members,
            build=lambda *_: self.nccl,
        )
        self.late_s = late_s

    def sums(self, is_async: bool) -> Any:
        def late() -> None:
            self.device.now_ns += self.late_s * S_NS

        options = c10d.AllreduceOptions()
        options.asyncOp = is_async
        stream = self.nccl._stream if is_async else self.device.current
        if not is_async:  # its kernel on the caller's stream lasts until the peer comes
            reduce = self.nccl.allreduce

            def allreduce(tensors: Any, opts: Any) -> Any:
                stream.order(late)
                return reduce(tensors, opts)

            self.nccl.allreduce = allreduce  # type: ignore[method-assign]
        else:  # time passes for the trainer's stream as well, when it has come to its wait
            trainers = self.device.current.ops
            stream.order(late, lambda: not trainers or not trainers[0][0]())
        return self.group.allreduce([torch.ones(3)], options)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("late_s", [1, 500])
def test_a_rank_that_waits_for_its_peer_has_done_no_more(is_async: bool, late_s: int) -> None:
    rank = WithPeer(late_s)
    rank.host.body_entered()
    rank.computes(5)
    work = rank.sums(is_async)
    work.wait()
    rank.computes(6)
    rank.ends(0)
    assert rank.told() == [{Section.COMPUTE: 11}]
    assert round(rank.clock.wait_ns / S_NS) == late_s


def test_the_host_s_collectives_tell_who_waits_in_them() -> None:
    members, told = Membership(), []
    members.on_wait = told.append
    nccl = FakeNccl(FakeDevice(random.Random(0).randrange))

    class Gloo:
        def get_future(self) -> Any:
            return _Later()

    class _Later:
        def add_done_callback(self, then: Any) -> None:
            threading.Timer(0.05, then, [self]).start()

        def value(self) -> None:
            return None

    nccl.allreduce = lambda tensors, opts: Gloo()  # type: ignore[method-assign,assignment,return-value]
    group = TorchGroup(
        dist.HashStore(), 0, 2, timedelta(seconds=10), "g", members, build=lambda *_: nccl
    )
    work = group.allreduce([torch.ones(3)], c10d.AllreduceOptions())
    assert told == [], "nobody waits yet"
    work.wait()
    assert told == [True, False]
    work.wait()
    assert told == [True, False], "it is over"
    assert StepWork(0, 0, 0, NONE_NS, NONE_NS, 0, NONE_NS, 0, 0).device_ns == NONE_NS
