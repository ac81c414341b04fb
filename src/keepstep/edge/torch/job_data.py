"""Job data: the loaders of a job, and what is told when the place in the data is not kept.

Comes in: DataLoaders from the program, its steps, restores. Goes out: loaders with a place, and
warnings, each once a life and once more after every restore.

A restart runs what the program does between `protect` and its first step once more: it splits data,
makes iterators, evaluates. There it has its own random numbers, as in its first life, and from the
first step on those of the step it goes on from. That needs a program whose steps are those of
`job.steps`; one that says where they begin may draw for a step before that, and has the restored
numbers at once.
"""

from __future__ import annotations

from typing import Any

from keepstep.edge.torch.batches import not_repeated
from keepstep.edge.torch.loader import Loader
from keepstep.edge.torch.rng import read_rng, write_rng
from keepstep.edge.torch.state import Protected
from keepstep.errors import ConfigError
from keepstep.model.events import WARNING
from keepstep.ports import Journal

STATE_NAME = "keepstep.steps"  # among the loaders' places


class JobData:
    def __init__(self, protected: Protected, world_size: int, journal: Journal) -> None:
        self._protected = protected
        self._loaders = protected.loaders
        self._world_size = world_size
        self._journal = journal
        self._watched_epoch: int | None = None  # since when the program's own loaders are watched
        self._resumed_at = -1
        self._places_own_data = False
        self._has_loop = False  # its steps are those of `job.steps`, in this life or the one before
        self._own_numbers = read_rng()  # the program's, as it called protect
        self._restored_numbers: dict[str, Any] | None = None  # for the first step
        self._loaders.add_beside(STATE_NAME, self)

    def restored(self, step: int) -> None:
        """All is restored; `step`: which, -1 for none. The program goes on."""
        if self._has_loop and step >= 0:
            self._restored_numbers = read_rng()
            write_rng(self._own_numbers)

    def loop_begins(self) -> None:
        self._has_loop = True
        self._put_numbers_back()

    def _put_numbers_back(self) -> None:
        if self._restored_numbers is not None:
            write_rng(self._restored_numbers)
            self._restored_numbers = None

    def state_dict(self) -> dict[str, Any]:
        """See `HasPlace`."""
        return {"loop": True} if self._has_loop else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `HasPlace`."""
        self._has_loop = bool(state.get("loop", False))

    def loader(self, dataloader: Any, name: str | None, step: int) -> Loader:
        """`step`: the restored one. Raises ConfigError."""
        if self._watched_epoch is not None:
            raise ConfigError("job.loader(): expected it before the first step, found it behind")
        loader, is_restored = self._loaders.add(dataloader, name, self._world_size)
        if step >= 0 and not is_restored:
            self._warn(
                f"the job goes on after step {step}, and loader {loader.name!r} begins at its "
                "start: no place was saved under this name"
            )
        if loader.remark:
            self._warn(loader.remark)
        if words := not_repeated(dataloader):
            self._warn(words)
        return loader

    def places_itself(self) -> None:
        self._places_own_data = True

    def step_begins(self, epoch: int, resumed_at: int) -> None:
        """`epoch`: the training's; a new one follows every restore. `resumed_at`: the step it began
        from."""
        self._put_numbers_back()
        if epoch == self._watched_epoch:
            return
        self._watched_epoch = epoch
        self._resumed_at = resumed_at
        unclaimed = ", ".join(self._loaders.unclaimed)
        if unclaimed:
            self._warn(
                f"the place of loader {unclaimed} was restored, and the program has made no such "
                "loader: expected the same job.loader() calls as before"
            )
        if not self._places_own_data:
            self._loaders.draws.begin()

    def step_ends(self) -> None:
        draws = self._loaders.draws
        if not draws.any_since(self._protected.objects.values()):
            return
        draws.end()  # until the next restore
        found = (
            f"the state of step {self._resumed_at} was restored, but no place in the data"
            if self._resumed_at >= 0
            else "a restart would begin the data anew"
        )
        self._warn(
            f"{found}: the program draws from a DataLoader that keepstep does not know. Take the "
            "batches from job.loader(dataloader), or call job.places_own_data() if the program "
            "finds its place itself"
        )

    def end(self) -> None:
        self._loaders.draws.end()

    def _warn(self, why: str) -> None:
        self._journal.record("caveat", why, level=WARNING)
