"""A suspicion tells of the first step that is not to be trusted, as it was seen then."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.numbers.suspicion import Suspicion
from keepstep.model.numbers import Sight, Sign
from keepstep.model.snapshot import Stamp

steps = st.integers(0, 9)
signs = st.lists(st.sampled_from(Sign), unique=True, max_size=3).map(tuple)
THEN = Sight(1, 1, (Sign.GRADIENT,), 5, bad_gradients=("then",), holds=(Stamp(3, 1),))


@st.composite
def sights(draw: st.DrawFn) -> Sight:
    """What a rank sees where all stand, in step 5 or later; or of an earlier copy."""
    return Sight(
        *(1, 1, draw(signs), draw(steps)),
        bad_gradients=("now",),
        holds=(Stamp(4, 1),),
        skips=2,
        means=draw(st.booleans()),
    )


@given(sights())
def test_the_first_step_is_told_as_it_was_seen(mine: Sight) -> None:
    told = Suspicion(5, THEN).told_with(mine, ())
    assert told.first_step == min(5, mine.first_step)
    assert told.bad_gradients == (("now",) if mine.first_step < 5 else ("then",))
    assert set(told.signs) == {Sign.GRADIENT, *mine.signs} and not told.means
    assert (told.holds, told.skips) == (mine.holds, mine.skips), "to go back to, as it is now"


@given(sights())
def test_what_leaves_no_trace_is_no_sign_when_the_state_is_finite_now(mine: Sight) -> None:
    found = Suspicion(5, THEN).told_with(mine, {Sign.GRADIENT})
    if mine.signs:
        assert set(found.signs) == set(mine.signs) and found.first_step == min(5, mine.first_step)
    else:
        assert found == mine


@given(sights(), steps)
def test_of_a_copy_there_is_no_evidence_but_what_is_there_now(mine: Sight, first: int) -> None:
    found = Suspicion(first).told_with(mine, ())
    if mine.signs:
        assert found == replace(mine, first_step=min(first, mine.first_step), means=False)
    else:
        assert found == mine
