"""What TRL's trainers hold between two updates; of stand-ins that have what TRL's have."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ConfigError
from keepstep.integrations.trl import TrlState, trl_components

numbers = st.lists(st.floats(allow_nan=False), max_size=5)


def generating(**others: Any) -> SimpleNamespace:
    """A trainer as it is made."""
    return SimpleNamespace(
        args=SimpleNamespace(sync_ref_model=False),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        _step=0,
        _buffered_inputs=None,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _logs={"prompt": deque(maxlen=3), "rewards": defaultdict(lambda: deque(maxlen=3))},
        **others,
    )


@given(step=st.integers(0, 9), reward=numbers, kl=numbers, prompts=st.lists(st.text(), max_size=5))
def test_another_trainer_goes_on_with_what_one_held(
    step: int, reward: list[float], kl: list[float], prompts: list[str]
) -> None:
    one = generating(entropy_coef=0.5)
    one._step = step
    one._buffered_inputs = [{"completion_ids": torch.arange(step)}, {"completion_ids": None}]
    one._metrics["train"]["kl"].extend(kl)
    one._logs["prompt"].extend(prompts)
    one._logs["rewards"]["length"].extend(reward)
    saved = copy.deepcopy(TrlState(one).state_dict())
    another = generating(entropy_coef=0.0)
    another._metrics["train"]["kl"].append(7.0)

    TrlState(another).load_state_dict(saved)

    assert (another._step, another.entropy_coef) == (step, 0.5)
    assert torch.equal(another._buffered_inputs[0]["completion_ids"], torch.arange(step))
    assert another._metrics["train"] == {"kl": kl}
    assert another._logs == one._logs
    another._metrics["train"]["new"].append(1.0)
    another._logs["rewards"]["new"].extend(range(9))
    assert list(another._logs["rewards"]["new"]) == [6, 7, 8]


@pytest.mark.parametrize("others", [{}, {"_metrics": {"loss": 1.0}}, {"_metrics": None}])
def test_another_library_s_trainer_has_nothing_more(others: dict[str, Any]) -> None:
    assert trl_components(SimpleNamespace(**others)) == {}


@pytest.mark.parametrize("moves", [False, True])
def test_the_reference_model_is_state_where_it_moves(moves: bool) -> None:
    reference = torch.nn.Linear(1, 1)
    trainer = generating(ref_model=reference)
    trainer.args.sync_ref_model = moves
    assert (trl_components(trainer).get("reference_model") is reference) == moves


@pytest.mark.parametrize("name", ["_step", "_metrics", "_logs"])
def test_one_that_keeps_them_in_another_way_is_refused(name: str) -> None:
    trainer = generating()
    delattr(trainer, name)
    with pytest.raises(ConfigError, match=name):
        trl_components(trainer)
