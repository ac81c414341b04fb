"""torchtitan's Trainer, protected: it begins where memory says, and not where a checkpoint on disk
does.

A step's boundary is where the Trainer asks whether to go on: the batch of the next step has not
been fetched, and validation, logging and torchtitan's own checkpoint of the step lie behind. All
ranks start anew when one is lost, from memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan.train import Trainer

import keepstep
from keepstep.integrations.boundary import Boundary
from keepstep.integrations.marks import Mark


class TorchtitanProtection:
    """To be derived from in front of a Trainer: `class Mine(TorchtitanProtection, FluxTrainer)`.

    `keepstep_config`: a `keepstep.Config` or a dict of its fields, as `protect` takes it.
    """

    keepstep_config: keepstep.Config | Mapping[str, Any] | None = None

    def keepstep_mark(self) -> Mark | None:
        """To be overridden. Called once, when training begins.

        Returns:
            What tells a tracker of each recovery, such as `wandb_mark(run)`; None: nothing does.
            Rank 0 alone calls it.
        """
        return None

    def train(self: Any) -> None:
        """Protects the components, trains, and lets the memory go when that has ended well.

        `protect` reads the dataloader's state, which makes its iterator: the random number that
        this draws is drawn before the first boundary.
        """
        job = keepstep.protect(
            self.keepstep_config,
            **{f"model_{i}": part for i, part in enumerate(self.model_parts)},
            **{f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)},
            lr_schedulers=self.lr_schedulers,
            dataloader=self.dataloader,
            train_state=self,
        )
        self._keepstep_boundary = Boundary(job, self.keepstep_mark())
        if job.step >= 0:
            self.checkpointer.load = self._already_restored
        super().train()  # type: ignore[misc]
        job.close()

    def should_continue_training(self: Any) -> bool:
        goes_on: bool = super().should_continue_training()  # type: ignore[misc]
        self._keepstep_boundary.reached(is_last=not goes_on)
        return goes_on

    @staticmethod
    def _already_restored(step: int = -1) -> bool:
        """In the place of the checkpointer's `load`: what it would load is older."""
        return False


class ProtectedTorchtitanTrainer(TorchtitanProtection, Trainer):  # type: ignore[misc]
    """torchtitan's Trainer, protected."""
