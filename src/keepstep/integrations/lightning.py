"""Lightning, protected: a callback that restores module, optimizers and all of Lightning's loops.

It restores before the fit loop begins, as Lightning restores its own checkpoints, and puts a
loader that knows its place in the place of the program's. All ranks start anew when one is lost,
from memory.

Invariant: a step of the job is one update, whatever number of batches it accumulates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call

import keepstep
from keepstep.edge.torch.batches import batches_of
from keepstep.edge.torch.random_stream import mixed
from keepstep.errors import ConfigError
from keepstep.integrations.boundary import Boundary
from keepstep.integrations.marks import Mark

KEPT_PLACES = 4  # Lightning may fetch a batch before it has trained on the one before


class KeepstepCallback(Callback):  # type: ignore[misc]
    """`Trainer(callbacks=[KeepstepCallback()])`."""

    def __init__(
        self,
        config: keepstep.Config | Mapping[str, Any] | None = None,
        mark: Mark | None = None,
    ) -> None:
        """
        Args:
            config: as `keepstep.protect` takes it.
            mark: tells a tracker of each recovery, such as `tensorboard_mark(writer)`. Rank 0 alone
                calls it.

        Raises:
            ConfigError: when the training begins, of a Trainer with several train dataloaders.
        """
        self._config, self._mark = config, mark

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_update = True
        self._progress = LightningProgress(trainer)
        optimizers = {f"optimizer_{i}": o for i, o in enumerate(trainer.optimizers)}
        schedulers = {
            f"scheduler_{i}": c.scheduler for i, c in enumerate(trainer.lr_scheduler_configs)
        }
        job = keepstep.protect(
            self._config, model=pl_module, **optimizers, **schedulers, lightning=self._progress
        )
        self._boundary = Boundary(job, self._mark)

    def on_train_batch_start(self, trainer: Trainer, _: Any, __: Any, batch_idx: int) -> None:
        self._progress.has_begun = True
        if self._has_update:
            self._progress.batch_in_flight = batch_idx
            self._boundary.reached()
        self._has_update = False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._has_update = not trainer.fit_loop._should_accumulate()

    def on_train_end(self, *_: Any) -> None:
        self._progress.batch_in_flight = None
        self._boundary.end()


class LightningProgress:
    """What Lightning counts and remembers besides module and optimizers, as a thing with state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.batch_in_flight: int | None = None  # its number in its epoch
        self.has_begun = False  # a batch, in this process
        self._loader: PlacedLoader | None = None
        self._saved_place: dict[str, Any] | None = None
        fit_loop = trainer.fit_loop
        self._set_up = fit_loop.setup_data
        fit_loop.setup_data = self._set_up_data

    def _set_up_data(self) -> None:
        """In the place of the fit loop's own: the same, and then the loader is exchanged."""
        self._set_up()
        fit_loop = self._trainer.fit_loop
        combined = fit_loop._combined_loader
        if combined is None or any(isinstance(dl, PlacedLoader) for dl in combined.flattened):
            return
        if len(combined.flattened) != 1:
            raise ConfigError(
                f"Lightning: expected one train dataloader, found {len(combined.flattened)}: where "
                "each of them stood cannot be told"
            )
        self._loader = PlacedLoader(combined.flattened[0], torch.initial_seed())
        if self._saved_place is not None:
            self._loader.load_state_dict(self._saved_place)
        combined.flattened = [self._loader]
        iter(fit_loop._data_fetcher)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        module_hook: dict[str, Any] = {}
        trainer.lightning_module.on_save_checkpoint(module_hook)
        place = None if self._loader is None else self._loader.state_dict(self.batch_in_flight)
        return {
            "loops": self._loops(),
            "callbacks": copy.deepcopy(call._call_callbacks_state_dict(trainer)),
            "precision": trainer.precision_plugin.state_dict(),
            "module": module_hook,
            "place": self._saved_place if place is None else place,
        }

    def _loops(self) -> dict[str, Any]:
        state: dict[str, Any] = copy.deepcopy(self._trainer.fit_loop.state_dict())
        state["state_dict"].pop("combined_loader", None)  # `place` it is
        if self.batch_in_flight is not None:  # fetched, and nothing has been done with it
            batches = state["epoch_loop.batch_progress"]
            batches["is_last_batch"] = False
            for counts in (batches["total"], batches["current"]):
                counts["ready"] = counts["completed"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state["loops"])
        self._pass_over_validation(trainer.fit_loop.epoch_loop)
        saved = {
            "callbacks": state["callbacks"],
            "pytorch-lightning_version": lightning.__version__,
            **state["module"],
        }
        call._call_callbacks_load_state_dict(trainer, saved)
        trainer.precision_plugin.load_state_dict(state["precision"])
        trainer.lightning_module.on_load_checkpoint(saved)
        self._saved_place = state["place"]

    def _pass_over_validation(self, epoch_loop: Any) -> None:
        """What was due behind the saved batch belongs to its step, and has been done. Lightning
        passes over it, too, but counts that batch again, and steps its schedulers again."""
        is_due = epoch_loop._should_check_val_fx
        epoch_loop._should_check_val_fx = lambda fetcher: self.has_begun and is_due(fetcher)


class PlacedLoader:
    """A loader whose epochs Lightning counts."""

    def __init__(self, source: Any, seed: int) -> None:
        self._source = source
        self._batches = batches_of(source)
        self._seed = seed
        self._epoch = 0
        self._skipped = 0
        self._places: dict[int, dict[str, Any]] = {}  # before each of the last batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_source"], name)

    def __len__(self) -> int:
        return len(self._source)

    @property
    def sampler(self) -> PlacedLoader:
        """Where Lightning tells the epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._skipped = 0
            self._places.clear()
            self._batches.end()

    def __iter__(self) -> Iterator[Any]:
        number = self._skipped
        batches = self._batches.begin(self._epoch, mixed(self._seed, self._epoch), number)
        while True:
            self._places[number] = self._batches.state_dict()
            self._places.pop(number - KEPT_PLACES, None)
            try:
                batch = next(batches)
            except StopIteration:
                return
            number += 1
            yield batch

    def state_dict(self, number: int | None = None) -> dict[str, Any]:
        """Before batch `number` of the epoch; None: at its end."""
        number = max(self._places, default=self._skipped) if number is None else number
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "taken": number,
            "batches": self._places.get(number) or self._batches.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed = state["seed"]
        self._epoch = state["epoch"]
        self._skipped = state["taken"]
        self._batches.load_state_dict(state["batches"])
