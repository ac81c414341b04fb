"""The step clock: own time and waits add up to all the time, each charged to its section."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.step_work import PASSES, Section, StepWork
from keepstep.runtime.rank.step_clock import NO_PASS, UNASKED_NS, StepClock


class Thread:
    """A trainer's thread, and what the kernel counts of it."""

    def __init__(self, sees_collectives: bool = True) -> None:
        self.wall_ns = self.cpu_ns = self.delay_ns = 1000
        self.written: list[StepWork] = []
        self.asked = 0  # for delays
        self.clock = StepClock(
            lambda: self.wall_ns,
            lambda: self.cpu_ns,
            self.asked_delay_ns,
            self.written.append,
            sees_collectives,
        )

    def asked_delay_ns(self) -> int:
        self.asked += 1
        return self.delay_ns

    def computes(self, ns: int) -> None:
        self.wall_ns += ns
        self.cpu_ns += ns

    def sleeps(self, ns: int) -> None:
        self.wall_ns += ns

    def is_ready(self, ns: int) -> None:
        """While others have the processor."""
        self.wall_ns += ns
        self.delay_ns += ns


def end(thread: Thread, step: int = 0) -> StepWork:
    thread.clock.step_ended(step, 1, 3)
    return thread.written[-1]


def own(work: StepWork) -> dict[Section, int]:
    return {section: work.own_ns[section] for section in Section if work.own_ns[section]}


def added(times_ns: tuple[int, ...]) -> int:
    """Of all sections; the passes are parts of the body."""
    return sum(ns for section, ns in enumerate(times_ns) if section not in PASSES)


def test_each_section_has_its_own_time() -> None:
    thread = Thread()
    clock = thread.clock
    thread.computes(1)
    clock.step_begun()
    thread.sleeps(20)
    clock.body_entered()
    thread.computes(300)
    assert clock.enter(Section.DATA) == Section.COMPUTE
    thread.sleeps(4)
    clock.back(Section.COMPUTE)
    clock.in_body()
    clock.enter(Section.HOOK)
    thread.computes(2)
    clock.enter(Section.UPDATE)
    thread.computes(50)
    clock.enter(Section.COMPUTE)
    clock.enter(Section.APART)
    thread.computes(6000)
    clock.enter(Section.COMPUTE)
    clock.worked(512)
    work = end(thread, 7)
    assert own(work) == {
        Section.DATA: 24,
        Section.COMPUTE: 300,
        Section.UPDATE: 50,
        Section.HOOK: 3,
        Section.APART: 6000,
    }
    assert work.cpu_ns[Section.DATA] == 0 and work.cpu_ns[Section.COMPUTE] == 300
    assert (work.step, work.epoch, work.collectives, work.tokens) == (7, 1, 3, 512)
    assert (work.wait_ns, work.ended_ns) == (0, thread.wall_ns)
    thread.sleeps(5)  # whatever comes before the next step is its data
    clock.enter(Section.HOOK)
    assert own(end(thread, 8))[Section.DATA] == 29


def test_a_body_that_does_not_say_when_it_begins_began_with_the_step() -> None:
    thread = Thread()
    thread.clock.step_begun()
    thread.sleeps(20)
    thread.clock.in_body()
    thread.clock.enter(Section.UPDATE)
    thread.computes(5)
    assert own(end(thread)) == {Section.COMPUTE: 20, Section.UPDATE: 5}
    thread.clock.step_begun()
    thread.computes(7)
    assert own(end(thread))[Section.COMPUTE] == 27, "also without an update"


def test_what_is_waited_in_collectives_is_not_the_ranks_own() -> None:
    thread = Thread()
    thread.clock.step_begun()
    thread.clock.body_entered()
    thread.computes(100)
    thread.clock.busy(True)
    thread.computes(40)  # beside the collective, as a backward pass does
    thread.is_ready(70_000)
    thread.sleeps(1000)
    thread.clock.busy(False)
    thread.sleeps(30)  # nobody is waited for here
    work = end(thread)
    assert own(work) == {Section.COMPUTE: 70_170} and work.wait_ns == 1000
    assert sum(work.delay_ns) == work.delay_ns[Section.COMPUTE] == 70_000


def test_where_collectives_are_not_seen_nothing_that_may_be_a_wait_is_its_own() -> None:
    thread = Thread(sees_collectives=False)
    thread.clock.step_begun()
    thread.is_ready(30_000)
    thread.sleeps(20)
    thread.clock.body_entered()
    thread.computes(100)
    thread.is_ready(70_000)
    thread.sleeps(1000)
    work = end(thread)
    assert own(work) == {Section.DATA: 30_020, Section.COMPUTE: 70_100} and work.wait_ns == 1000
    thread.clock.step_begun()
    thread.sleeps(50)
    thread.computes(2)
    again = end(thread)
    assert again.own_ns[Section.COMPUTE] == 70_102 and again.wait_ns == 1050


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("computes"), st.integers(0, 99_000)),
        st.tuples(st.just("sleeps"), st.integers(0, 99_000)),
        st.tuples(st.just("is_ready"), st.integers(0, 99_000)),
        st.tuples(st.just("enter"), st.sampled_from([s for s in Section if s not in PASSES])),
        st.tuples(st.just("forward_ended"), st.sampled_from([NO_PASS, int(Section.FORWARD)])),
        st.tuples(st.just("busy"), st.booleans()),
        st.tuples(st.sampled_from(["step_begun", "body_entered", "in_body", "end"]), st.none()),
        st.tuples(
            st.sampled_from(["forward_begun", "backward_begun", "backward_ended"]), st.none()
        ),
    ),
    max_size=60,
)


@given(ACTS, st.booleans())
def test_own_time_and_waits_are_all_the_time(acts: list[tuple[str, object]], sees: bool) -> None:
    thread = Thread(sees)
    for name, given_ in acts:
        if name == "end":
            end(thread)
        elif hasattr(thread, name):
            getattr(thread, name)(given_)
        else:
            getattr(thread.clock, name)(*(() if given_ is None else (given_,)))
    work = end(thread)
    assert added(work.own_ns) + work.wait_ns == thread.wall_ns - 1000
    assert added(work.cpu_ns) == thread.cpu_ns - 1000
    for times_ns in (work.own_ns, work.cpu_ns, work.delay_ns):
        assert sum(times_ns[one] for one in PASSES) <= times_ns[Section.COMPUTE]
    assert min(*work.own_ns, *work.cpu_ns, work.wait_ns) >= 0
    sums = [(*w.own_ns, *w.cpu_ns, *w.delay_ns, w.wait_ns) for w in thread.written]
    assert all(a <= b for old, new in pairwise(sums) for a, b in zip(old, new, strict=True))


def test_forward_and_backward_pass_are_told_apart_where_they_are_seen() -> None:
    thread = Thread()
    clock = thread.clock
    clock.body_entered()
    thread.computes(1)  # a batch is made ready
    for _ in range(2):
        before = clock.forward_begun()
        thread.computes(10)
        inner = clock.forward_begun()  # another protected module, within
        thread.computes(5)
        clock.forward_ended(inner)
        thread.computes(2)
        clock.forward_ended(before)
        thread.computes(3)  # a loss
        clock.backward_begun()
        thread.computes(30)
        clock.backward_begun()  # it goes through another protected module, too
        thread.computes(4)
        clock.backward_ended()
        clock.backward_ended()
        thread.computes(1)  # clipping
    clock.enter(Section.UPDATE)
    clock.backward_begun()
    thread.computes(50)
    work = end(thread)
    assert own(work) == {
        Section.COMPUTE: 1 + 2 * 55,
        Section.UPDATE: 50,
        Section.FORWARD: 2 * 17,
        Section.BACKWARD: 2 * 34,
    }
    assert work.cpu_ns[Section.FORWARD] == 2 * 17


def test_what_is_waited_within_a_pass_is_not_of_it() -> None:
    thread = Thread()
    thread.clock.body_entered()
    thread.clock.forward_begun()
    thread.computes(10)
    thread.clock.busy(True)
    thread.sleeps(100)
    thread.is_ready(30_000)
    thread.clock.busy(False)
    thread.clock.forward_ended(NO_PASS)
    work = end(thread)
    assert own(work) == {Section.COMPUTE: 30_010, Section.FORWARD: 30_010} and work.wait_ns == 100
    assert work.delay_ns[Section.FORWARD] == 30_000


def test_the_kernel_is_asked_for_delays_only_where_there_can_be_some() -> None:
    thread = Thread()
    thread.clock.body_entered()
    for section in (Section.HOOK, Section.UPDATE, Section.COMPUTE):
        thread.computes(10**6)
        thread.is_ready(UNASKED_NS)
        thread.clock.enter(section)
    assert thread.asked == 1, "as it began"
    thread.is_ready(UNASKED_NS + 1)
    work = end(thread)
    assert thread.asked == 2
    assert sum(work.delay_ns) == thread.delay_ns - 1000, "with what was not asked before"
    assert sum(work.own_ns) == thread.wall_ns - 1000


def test_a_backward_pass_within_a_forward_one_is_followed_by_what_is_left_of_that() -> None:
    thread = Thread()
    clock = thread.clock
    clock.body_entered()
    before = clock.forward_begun()
    thread.computes(10)
    clock.backward_begun()
    thread.computes(20)
    clock.backward_ended()
    thread.computes(5)
    clock.forward_ended(before)
    clock.backward_begun()  # one that fails
    thread.computes(7)
    clock.forward_begun()
    thread.computes(3)
    work = end(thread)
    assert own(work) == {Section.COMPUTE: 45, Section.FORWARD: 18, Section.BACKWARD: 27}


def test_a_pass_is_over_where_the_trainer_is_elsewhere() -> None:
    thread = Thread()
    clock = thread.clock
    clock.step_begun()
    clock.forward_begun()  # the body has not said that it begins
    thread.computes(4)
    clock.back(clock.enter(Section.DATA))
    thread.computes(6)
    clock.enter(Section.APART)
    clock.forward_ended(clock.forward_begun())
    clock.backward_begun()
    thread.computes(100)
    work = end(thread)
    assert own(work) == {Section.COMPUTE: 10, Section.APART: 100, Section.FORWARD: 4}
    clock.backward_begun()
    thread.computes(9)
    clock.backward_ended()
    assert Section.BACKWARD not in own(end(thread, 1)), "between two steps"
