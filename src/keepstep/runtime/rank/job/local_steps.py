"""Local steps of a job: each rank for itself, and parameters averaged behind every so many steps.

Comes in: the loop's steps. Goes out: bodies without a reduction, and the mean
(edge/torch/local_steps.py). Which step ends a period follows from its number alone, so a step that
is done again does the same. Invariant: no clock and no other rank's speed changes a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keepstep.config import Settings
from keepstep.edge.torch.local_steps import average, without_reduction
from keepstep.edge.torch.micro_batches import learning
from keepstep.edge.torch.state import Protected
from keepstep.errors import ConfigError

CALLER = "local_steps()"


class LocalSteps:
    """Of one rank."""

    def __init__(
        self,
        protected: Protected,
        ranks: int,
        settings: Settings,
        check_peers: Callable[[], object],
    ) -> None:
        """check_peers: raises PeerLost when what came from them is worthless."""
        self._protected, self._ranks = protected, ranks
        self._check_peers = check_peers
        self._shares_replicas = settings.share_replicas != "off"

    @contextmanager
    def of_step(self, step: int | None, every: int, model: Any) -> Iterator[None]:
        """Around that one's work; None: no step has begun. Raises ConfigError, PeerLost."""
        if step is None:
            raise ConfigError(f"{CALLER}: expected it within a step, found none begun")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"{CALLER} expected every= a whole number of steps, found {every!r}")
        if self._shares_replicas:
            raise ConfigError(
                f"{CALLER}: expected share_replicas off, found it on: ranks differ between two "
                "means"
            )
        models, parameters = learning(self._protected, model, self._ranks, CALLER)
        with without_reduction(models):
            yield
        if self._ranks > 1 and (step + 1) % every == 0:
            average(parameters, self._ranks, self._check_peers)
