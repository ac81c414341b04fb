"""Micro-batches of a job: a step's work shared among its ranks by how fast they are.

    every few steps all ranks tell what one micro-batch takes them -> core/balance/rebalancing.py
    -> whose micro-batch is whose -> edge/torch/micro_batches.py runs this rank's

Comes in: the loop's steps. Goes out: this rank's micro-batches, `rebalanced` in the journal, and a
part of the state. Shares change only where a step begins, on all ranks alike: all decide from what
all have told, and what they have decided from before is restored with the state.

Invariant: each micro-batch of a step is computed by one rank, whatever the shares are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any
from zlib import crc32

from keepstep.core.balance.rebalancing import LOOK_STEPS, Rebalancing
from keepstep.core.balance.shares import work_of
from keepstep.edge.torch.micro_batches import (
    MicroBatch,
    MicroBatchRun,
    micro_batch_run,
    own_seed,
    tell_all,
)
from keepstep.edge.torch.state import Protected
from keepstep.errors import ConfigError
from keepstep.model.events import WARNING
from keepstep.ports import Journal

STATE_NAME = "keepstep.micro_batches"  # among the loaders' places


class MicroBatches:
    """Of one rank."""

    def __init__(
        self,
        protected: Protected,
        rank: int,
        ranks: int,
        journal: Journal,
        check_peers: Callable[[], object],
        worked: Callable[[int], None],
    ) -> None:
        """check_peers: raises PeerLost when what came from them is worthless. worked: hears how
        many this rank computes in a step."""
        self._protected, self._journal = protected, journal
        self._rank, self._ranks = rank, ranks
        self._check_peers, self._worked = check_peers, worked
        self._in_order = True
        self._sharing: Rebalancing | None = None
        self._seed: int | None = None
        self._restored: dict[str, Any] = {}
        self._run: MicroBatchRun | None = None
        self._under_way: Generator[MicroBatch, None, None] | None = None
        self._last_step = -1
        self._has_told: set[str] = set()
        protected.loaders.add_beside(STATE_NAME, self)

    def of_step(
        self, step: int | None, resumed_at: int, total: int, model: Any, in_order: bool
    ) -> Iterator[MicroBatch]:
        """This rank's of that step; None: no step has begun. resumed_at: from which step all have
        gone on.

        Raises ConfigError, PeerLost."""
        if step is None:
            raise ConfigError("micro_batches(): expected it within a step, found none begun")
        is_first = step == resumed_at + 1
        if self._under_way is not None:
            self._under_way.close()  # of a body that was left in the middle
        if step == self._last_step and not is_first:
            raise ConfigError("micro_batches() was called twice in one step: expected once")
        self._last_step = step
        sharing = self._sharing
        if sharing is None or sharing.total != total or self._in_order != in_order:
            sharing = self._begin(total, model, in_order)
        if self._ranks == 1:
            self._seed = own_seed() if self._seed is None else self._seed
        elif is_first or self._seed is None or step % LOOK_STEPS == 0:
            self._look(sharing, step)
        work = work_of(sharing.shares)
        self._worked(len(work[self._rank]))
        assert self._run is not None
        self._under_way = self._run.run(step, work, self._ranks / total, self._seed or 0)
        return self._under_way

    def _begin(self, total: int, model: Any, in_order: bool) -> Rebalancing:
        if isinstance(total, bool) or not isinstance(total, int) or total < self._ranks:
            raise ConfigError(
                f"micro_batches() expected a whole number, at least one for each of {self._ranks} "
                f"ranks, found {total!r}"
            )
        self._run = micro_batch_run(self._protected, model, self._rank, self._ranks, in_order)
        self._in_order = in_order
        self._sharing = Rebalancing(total, self._ranks)
        self._take_restored()
        if not self._sharing.can_change and self._ranks > 1:
            self._tell_once(
                f"{total} micro-batches for {self._ranks} ranks are too few to be shared by speed: "
                f"expected at least {2 * self._ranks}"
            )
        return self._sharing

    def _look(self, sharing: Rebalancing, step: int) -> None:
        assert self._run is not None
        is_moving = self._run.changes_buffers
        seed = own_seed() if self._seed is None else self._seed
        known = crc32(repr(sharing.state_dict()).encode())
        mine = (self._run.take_ns(), sharing.total, self._in_order, is_moving, seed, known)
        told = tell_all(mine, self._ranks)
        self._check_peers()
        costs_ns, totals, orders, moving, seeds, all_known = zip(*told, strict=True)
        if len({*zip(totals, orders, strict=True)}) > 1 and min(totals) > 0:
            raise ConfigError(
                "micro_batches() expected the same on all ranks, found numbers "
                f"{sorted(set(totals))} and in_order {sorted(map(bool, set(orders)))}"
            )
        self._seed = seeds[0]
        if len(set(all_known)) > 1:  # never so far: a state of all is of one step
            sharing.begin_anew()
            self._tell_once("ranks knew of different shares of micro-batches: all begin anew")
        if self._in_order and any(moving):
            self._tell_once(
                "micro-batches are not shared by speed: the forward pass changes buffers (batch "
                "statistics, say), which stay with the rank that computes it; in_order=False "
                "shares them nevertheless"
            )
            return
        changed = sharing.look(costs_ns, step)
        if changed is not None and self._rank == 0:
            self._journal.record(
                "rebalanced",
                changed.why,
                WARNING,
                step=step,
                shares=list(changed.shares),
                before=list(changed.before),
                costs_ns=list(changed.costs_ns),
                before_ns=changed.before_ns,
                after_ns=changed.after_ns,
                even_ns=changed.even_ns,
            )

    def _tell_once(self, why: str) -> None:
        if self._rank == 0 and why not in self._has_told:
            self._has_told.add(why)
            self._journal.record("caveat", why, WARNING)

    # -- a part of the state

    def state_dict(self) -> dict[str, Any]:
        if self._sharing is None:
            return self._restored
        return {**self._sharing.state_dict(), "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = dict(state)
        self._seed = None
        if self._sharing is not None:
            self._sharing = Rebalancing(self._sharing.total, self._ranks)
            self._take_restored()

    def _take_restored(self) -> None:
        state, self._restored = self._restored, {}
        self._seed = state.get("seed", self._seed)
        if state and self._sharing is not None and not self._sharing.load_state_dict(state):
            self._tell_once(
                "the restored shares of micro-batches are of another number of them, or of ranks: "
                "all begin with equal ones"
            )
