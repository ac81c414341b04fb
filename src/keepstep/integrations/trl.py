"""What TRL's trainers hold between two updates besides the Trainer's state, as a thing with state.

Those that generate (GRPO, RLOO) make completions for several updates at once, and keep them. Made
again in the midst of those updates they would be others: of other weights and other random numbers.
So they are state, each rank's its own, and so is the count that says which part of them is next.
All of them gather metrics between two logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep.errors import ConfigError

NEEDED_WITH_COMPLETIONS = ("_step", "_metrics", "_logs")
VALUES = (
    "_step",
    "_buffered_inputs",
    "_total_train_tokens",
    "entropy_coef",  # GRPO's controller of the entropy moves it, and what it looks at
    "_last_world_entropy",
)
GATHERED = ("_metrics", "_logs")


def trl_components(trainer: Any) -> dict[str, Any]:
    """What is to be protected of a trainer of TRL's besides its Trainer's state: nothing if it is
    none. The reference model is among it if it moves."""
    has_completions = hasattr(trainer, "_buffered_inputs")
    missing = [name for name in NEEDED_WITH_COMPLETIONS if not hasattr(trainer, name)]
    if has_completions and missing:
        raise ConfigError(
            f"{type(trainer).__name__} keeps completions, but has no {', '.join(missing)}: where "
            "it stands in them cannot be told; TRL 1's GRPOTrainer and RLOOTrainer are covered"
        )
    metrics = getattr(trainer, "_metrics", None)
    if not isinstance(metrics, Mapping) or "train" not in metrics:
        return {}
    components: dict[str, Any] = {"trl": TrlState(trainer)}
    if getattr(trainer.args, "sync_ref_model", False):
        components["reference_model"] = trainer.accelerator.unwrap_model(trainer.ref_model)
    return components


class TrlState:
    """The completions that are trained on, how far, and what is gathered for the next log."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        held = vars(self._trainer)
        return {
            "values": {name: held[name] for name in VALUES if name in held},
            "gathered": {name: _plain(held[name]) for name in GATHERED if name in held},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["values"].items():
            setattr(self._trainer, name, value)
        _refill(vars(self._trainer), state["gathered"])


def _plain(gathered: Any) -> Any:
    """Dicts and lists, copied, in the place of defaultdicts and deques."""
    if isinstance(gathered, Mapping):
        return {name: _plain(part) for name, part in gathered.items()}
    return list(gathered)


def _refill(gathered: Any, saved: Mapping[str, Any]) -> None:
    """Fills in place: defaultdicts know how to make what they lack, and deques their length."""
    for name, part in saved.items():
        if isinstance(part, Mapping):
            _refill(gathered[name], part)
        else:
            gathered[name].clear()
            gathered[name].extend(part)
