"""Nothing is removed under a living rank or agent, and nothing is kept for ever."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepstep.core.recovery.job_lifetime import Finish, JobLifetime
from keepstep.model.units import S_NS

GRACE_NS = 30 * S_NS


def lifetime(world_size: int = 2) -> JobLifetime:
    new = JobLifetime(GRACE_NS, alone_since_ns=0)
    for rank in range(world_size):
        new.rank_came(rank, world_size)
    return new


class Comings(RuleBasedStateMachine):
    """Ranks and agents come, speak and go in any order; time passes. The ghosts know who is there
    and since when nobody is."""

    @initialize(world=st.integers(1, 3))
    def begin(self, world: int) -> None:
        self.lifetime = JobLifetime(GRACE_NS, 0)
        self.world, self.now_ns, self.alone_since_ns = world, 0, 0
        self.here: set[int] = set()
        self.good: set[int] = set()
        self.agent = self.ended = False

    @rule(rank=st.integers(0, 2))
    def come(self, rank: int) -> None:
        rank %= self.world
        self.lifetime.rank_came(rank, self.world)
        self.here.add(rank)
        self.good.discard(rank)

    @rule(
        rank=st.integers(0, 2),
        word=st.sampled_from(["ended well", "interrupted", "ValueError: no"]),
    )
    @precondition(lambda self: self.here)
    def speak(self, rank: int, word: str) -> None:
        rank = sorted(self.here)[rank % len(self.here)]
        self.lifetime.rank_said_bye(rank, word == "ended well", word)
        (self.good.add if word == "ended well" else self.good.discard)(rank)

    @rule(rank=st.integers(0, 2))
    @precondition(lambda self: self.here)
    def leave(self, rank: int) -> None:
        rank = sorted(self.here)[rank % len(self.here)]
        self.here.remove(rank)
        self.lifetime.rank_left(rank, self.now_ns)
        self.mark()

    @rule()
    @precondition(lambda self: not self.agent)
    def agent_comes(self) -> None:
        self.agent = True
        self.lifetime.agent_came()

    @rule()
    @precondition(lambda self: self.agent)
    def agent_leaves(self) -> None:
        self.agent = False
        self.lifetime.agent_left(self.now_ns)
        self.mark()

    def mark(self) -> None:
        if not self.here and not self.agent:
            self.alone_since_ns = self.now_ns

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.now_ns += seconds * S_NS

    @invariant()
    def ends_exactly_when_it_should(self) -> None:
        if not hasattr(self, "lifetime"):
            return
        found = self.lifetime.decide(self.now_ns)
        all_well = len(self.good) == self.world
        alone = not self.here and not self.agent
        if self.agent:
            expected = None
        elif all_well:
            expected = True
        elif alone and self.now_ns - self.alone_since_ns > GRACE_NS:
            expected = False
        else:
            expected = None
        assert (None if found is None else found.ok) is expected, found


TestComings = Comings.TestCase
TestComings.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, derandomize=True
)


def test_the_agent_has_the_last_word() -> None:
    kept = lifetime()
    kept.agent_came()
    for rank in (0, 1):
        kept.rank_said_bye(rank, True, "ended well")
    assert kept.decide(S_NS) is None, "an agent may want to restart what ended"
    kept.agent_said_end(False, "rank 1 failed 3 times")
    assert kept.decide(S_NS) == Finish(False, "rank 1 failed 3 times")


def test_the_reason_names_the_times() -> None:
    kept = lifetime(1)
    kept.rank_left(0, 10 * S_NS)
    assert kept.decide(40 * S_NS) is None
    finish = kept.decide(41 * S_NS)
    assert finish == Finish(
        False, "agent and ranks have been gone for 31.00 s, longer than the grace time of 30.00 s"
    )


def test_a_keeper_that_nobody_joins_goes_too() -> None:
    assert JobLifetime(GRACE_NS, alone_since_ns=5 * S_NS).decide(36 * S_NS) is not None


def test_without_any_grace_the_first_rank_still_has_time_to_come() -> None:
    kept = JobLifetime(0, alone_since_ns=0)
    assert kept.decide(5 * S_NS) is None
    assert kept.decide(11 * S_NS) is not None
    kept.rank_came(0, 1)
    kept.rank_left(0, 6 * S_NS)
    assert kept.decide(6 * S_NS + 1) is not None


def test_words_of_an_earlier_and_larger_world_are_forgotten() -> None:
    kept = lifetime(3)
    for rank in (0, 1, 2):
        kept.rank_said_bye(rank, False, "left after step 4")
        kept.rank_left(rank, S_NS)
    kept.rank_came(0, 1)
    kept.rank_said_bye(0, True, "ended well")
    assert kept.decide(2 * S_NS) == Finish(True, "the only rank ended well")


def test_good_words_of_an_earlier_and_smaller_world_do_not_end_a_larger_one() -> None:
    kept = lifetime(1)
    kept.rank_said_bye(0, False, "left after step 4")
    kept.rank_left(0, S_NS)
    kept.rank_came(1, 2)
    kept.rank_said_bye(1, True, "ended well")
    kept.rank_came(0, 2)
    assert kept.decide(2 * S_NS) is None


def test_a_failing_end_keeps_the_memory_for_the_grace_time() -> None:
    found = JobLifetime(grace_ns=10, alone_since_ns=0)
    found.agent_came()
    assert not found.agent_said_end(False, "the model has another shape", holds_snapshots=True)
    assert found.decide(5) is None
    found.agent_left(5)
    assert found.decide(15) is None and isinstance(found.decide(16), Finish)


def test_a_failing_end_without_snapshots_and_a_good_one_are_over_at_once() -> None:
    for ok, holds_snapshots in ((False, False), (True, True), (True, False)):
        over = JobLifetime(grace_ns=10, alone_since_ns=0)
        over.agent_came()
        assert over.agent_said_end(ok, "its end", holds_snapshots)
        assert over.decide(1) == Finish(ok, "its end")


def test_a_keeper_that_holds_nothing_leaves_with_its_last_client() -> None:
    kept = lifetime(1)
    kept.rank_left(0, 5 * S_NS)
    assert kept.decide(6 * S_NS, holds_snapshots=False) is None, "who was killed comes back"
    finish = kept.decide(6 * S_NS + 1, holds_snapshots=False)
    assert finish is not None and not finish.ok
    assert kept.decide(6 * S_NS + 1, holds_snapshots=True) is None


def test_nothing_is_removed_under_a_rank_that_has_its_page_and_has_not_come_yet() -> None:
    kept = lifetime(1)
    kept.rank_left(0, 0)
    for now_ns, holds in ((2 * S_NS, False), (31 * S_NS, True)):
        assert kept.decide(now_ns, holds, is_entered=lambda: True) is None
        assert kept.decide(now_ns, holds, is_entered=lambda: False) is not None


def test_who_said_that_it_ended_well_may_own_its_page_for_a_moment_more() -> None:
    kept = lifetime(1)
    kept.rank_said_bye(0, True, "ended well")
    assert kept.decide(1, is_entered=lambda: True) is not None


def test_a_person_who_wants_it_gone_is_not_made_to_wait() -> None:
    kept = lifetime(1)
    kept.memory_unwanted("keepstep clean")
    assert kept.decide(1) == Finish(False, "keepstep clean")


def test_other_nodes_are_waited_for_but_not_for_ever() -> None:
    kept = lifetime(1)
    kept.mesh_began(3, [0])
    kept.rank_said_bye(0, True, "ended well")
    assert kept.ended_here and kept.decide(S_NS) is None
    kept.rank_left(0, 2 * S_NS)
    assert kept.decide(32 * S_NS) is None and kept.decide(33 * S_NS) is not None
    kept.all_nodes_ended = True
    assert kept.decide(3 * S_NS) == Finish(
        True, "the only rank of this node, and those of 2 more, ended well"
    )


def test_what_was_the_end_of_one_round_is_not_that_of_the_next() -> None:
    kept = lifetime(1)
    kept.mesh_began(2, [0])
    kept.rank_said_bye(0, True, "ended well")
    kept.all_nodes_ended = True
    kept.mesh_began(2, [0])
    kept.rank_came(0, 1)
    kept.rank_said_bye(0, True, "ended well")
    assert kept.decide(S_NS) is None


def test_a_keeper_that_came_mid_round_may_meet_ranks_before_it_knows_which_are_here() -> None:
    kept = JobLifetime(grace_ns=10, alone_since_ns=0)
    kept.rank_came(3, 4)
    kept.rank_said_bye(3, True, "ended well")
    kept.mesh_began(2, [2, 3])
    assert not kept.ended_here
    kept.rank_came(2, 2)
    kept.rank_said_bye(2, True, "ended well")
    assert kept.ended_here
