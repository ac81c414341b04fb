"""Loss: the completed steps that are done again after all have gone back to a state, in words."""

from __future__ import annotations

from keepstep.model.units import counted


def loss_words(lost_steps: int | None, at_least: int = 0) -> str:
    """`1 completed step lost`. None: nobody knows how far the job had come; `at_least`: by so many
    steps it had, for certain."""
    if lost_steps is not None:
        return f"{counted(lost_steps, 'completed step')} lost"
    if at_least:
        return f"at least {counted(at_least, 'completed step')} lost"
    return "an unknown number of completed steps lost, perhaps none"
