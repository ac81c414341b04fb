"""Hugging Face's Trainer, protected: it goes on after its last step, batch and log.

A callback is called too late: the Trainer has decided by then in which epoch and at which batch it
begins. So this is a class to derive from, and what it restores it restores between the Trainer's
preparation of model and optimizer and that decision. All ranks start anew when one is lost,
from memory.

Invariant: step n of the job is the Trainer's update number n + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.trainer_callback import ExportableState

import keepstep
from keepstep.edge.torch.rng import read_rng, write_rng
from keepstep.errors import ConfigError
from keepstep.integrations.boundary import Boundary
from keepstep.integrations.marks import Mark
from keepstep.integrations.trl import trl_components

# In the place of a checkpoint's directory: the Trainer skips batches only when there is one.
FROM_MEMORY = "<keepstep>"
HOOKS = (
    "_get_train_sampler",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_load_rng_state",
)


class TrainerProtection:
    """To be derived from in front of a Trainer: `class Mine(TrainerProtection, SFTTrainer)`.

    `keepstep_config`: a `keepstep.Config` or a dict of its fields, as `protect` takes it.

    Raises:
        ConfigError: the class behind it is no Trainer of transformers 5.
    """

    keepstep_config: keepstep.Config | Mapping[str, Any] | None = None
    _keepstep_sampler: Any = None

    def keepstep_components(self) -> dict[str, Any]:
        """To be overridden.

        Returns:
            What else is to be protected, by names as `protect` takes them.
        """
        return {}

    def keepstep_mark(self) -> Mark | None:
        """To be overridden. Called once, when training begins.

        Returns:
            What tells a tracker of each recovery, such as `tensorboard_mark(writer)`; None: nothing
            does. Rank 0 alone calls it.
        """
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        missing = [name for name in HOOKS if not hasattr(cls, name)]
        if missing:
            raise ConfigError(
                f"{cls.__name__}: expected a Trainer of transformers 5, found one without "
                f"{', '.join(missing)}"
            )

    def _get_train_sampler(self: Any, *args: Any) -> Any:
        self._keepstep_sampler = super()._get_train_sampler(*args)  # type: ignore[misc]
        return self._keepstep_sampler

    def get_train_dataloader(self: Any) -> Any:
        self._keepstep_dataloader = super().get_train_dataloader()  # type: ignore[misc]
        return self._keepstep_dataloader

    def _init_training_state(
        self: Any,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        begins_at: tuple[int, int] = super()._init_training_state(  # type: ignore[misc]
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._keepstep_prepared = super()._prepare_for_training(  # type: ignore[misc]
            max_steps, self._keepstep_dataloader, resume_from_checkpoint
        )
        position = TrainerPosition(self)
        self._keepstep_position = position
        scaler = getattr(self.accelerator, "scaler", None)
        job = keepstep.protect(
            self.keepstep_config,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            trainer=position,
            **({} if scaler is None else {"scaler": scaler}),
            **trl_components(self),
            **self.keepstep_components(),
        )
        self._keepstep_restored = job.step >= 0
        self.add_callback(TrainerSteps(Boundary(job, self.keepstep_mark()), position))
        if not self._keepstep_restored:
            return begins_at
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        epochs, updates = divmod(self.state.global_step, num_update_steps_per_epoch)
        return epochs, updates * self.args.gradient_accumulation_steps

    def _prepare_for_training(self: Any, *_: Any, **__: Any) -> Any:
        return self._keepstep_prepared

    def _run_epoch(self: Any, **kwargs: Any) -> None:
        if self._keepstep_restored:
            kwargs["resume_from_checkpoint"] = FROM_MEMORY
        self._keepstep_position.epoch_begins()
        super()._run_epoch(**kwargs)  # type: ignore[misc]
        if self.state.global_step % kwargs["num_update_steps_per_epoch"] == 0:
            self._keepstep_position.epoch_begins()

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint != FROM_MEMORY:  # `Boundary` puts them back
            super()._load_rng_state(checkpoint)  # type: ignore[misc]


class TrainerPosition:
    """What the Trainer counts and remembers besides its model, as a thing with state."""

    SUMS = (
        "_total_loss_scalar",
        "_initial_global_step",
        "_globalstep_last_logged",
        "current_flos",
    )

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._sums: dict[str, Any] | None = None
        # The random states out of which the epoch's order is drawn.
        self._order: dict[str, Any] | None = None
        self._restored_order: dict[str, Any] | None = None

    def epoch_begins(self) -> None:
        """Before the epoch's order is drawn: out of the sampler's own generator, or the process's.
        In a restarted process that is the same order then."""
        generator = getattr(self._trainer._keepstep_sampler, "generator", None)
        own = generator if isinstance(generator, torch.Generator) else None
        if self._restored_order is not None:
            write_rng(self._restored_order["process"])  # `Boundary` puts back those of the step
            if own is not None and self._restored_order["sampler"] is not None:
                own.set_state(self._restored_order["sampler"])
            self._restored_order = None
        self._order = {
            "process": read_rng(),
            "sampler": None if own is None else own.get_state(),
        }

    def _stateful_callbacks(self) -> list[ExportableState]:
        found = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [callback for callback in found if isinstance(callback, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        fields = {f.name: getattr(trainer.state, f.name) for f in dataclasses.fields(trainer.state)}
        fields.pop("stateful_callbacks")
        loss = getattr(trainer, "_tr_loss", None)
        return {
            "state": fields,
            "callbacks": [(type(c).__name__, c.state()) for c in self._stateful_callbacks()],
            "sums": {name: getattr(trainer, name, 0) for name in self.SUMS},
            "loss": None if loss is None else loss.item(),
            "order": self._order,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["state"].items():
            setattr(self._trainer.state, name, value)
        for callback, (name, saved) in zip(
            self._stateful_callbacks(), state["callbacks"], strict=False
        ):
            if type(callback).__name__ == name:
                for attribute, value in {**saved["args"], **saved["attributes"]}.items():
                    setattr(callback, attribute, value)
        self._sums = {**state["sums"], "_tr_loss": state["loss"]}
        self._restored_order = state["order"]

    def training_begins(self) -> None:
        """The Trainer has set its sums to nothing: they are put back now."""
        if self._sums is None:
            return
        loss = torch.tensor(self._sums.pop("_tr_loss") or 0.0, device=self._trainer.args.device)
        self._trainer._tr_loss = loss
        for name, value in self._sums.items():
            setattr(self._trainer, name, value)
        self._sums = None


class TrainerSteps(transformers.TrainerCallback):  # type: ignore[misc]
    """Tells the Trainer's steps."""

    def __init__(self, boundary: Boundary, position: TrainerPosition) -> None:
        self._boundary = boundary
        self._position = position

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._position.training_begins()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._boundary.reached()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._boundary.end()


class ProtectedTrainer(TrainerProtection, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer`, protected."""
