"""State: from the objects a user protects to tensors with names plus one pickled tree.

Comes in: modules, optimizers, anything with `state_dict`/`load_state_dict`, tensors, picklable
values, and containers of them. Goes out: a list of items (a tensor's place and kind) and the tree's
bytes, in which every tensor is an index (`tree.py`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from keepstep.edge.os.collector import collector_paused
from keepstep.edge.torch.beside import UsedGradients, read_beside
from keepstep.edge.torch.ddp_buckets import Buckets
from keepstep.edge.torch.dtensors import is_dtensor
from keepstep.edge.torch.foreign_draws import ForeignDraws
from keepstep.edge.torch.frozen import FEWEST_BYTES
from keepstep.edge.torch.loader import Loaders
from keepstep.edge.torch.made_with import MadeWith, class_names, made_with
from keepstep.edge.torch.parts import (
    bare,
    check_names,
    kind_of,
    parameters_of,
    parts_inside,
    state_of,
)
from keepstep.edge.torch.pickles.inert import Uses, uses_of
from keepstep.edge.torch.pickles.known import Call, Name
from keepstep.edge.torch.pickles.newcomers import Newcomers
from keepstep.edge.torch.pickles.own import Own
from keepstep.edge.torch.plan import ABOUT, BESIDE, CopyOrder, StatePlan
from keepstep.edge.torch.rng import PickledNumbers, put_back, read_rng, tensors_of
from keepstep.edge.torch.tree import (
    SECTIONS,
    Kept,
    MeshKey,
    StateItem,
    TreePickler,
    local_part,
    mesh_key,
    name_tensors,
)
from keepstep.edge.torch.unfenced import (
    path_of,
    unfenced_remark,
    why_this_update,
    why_unfenced,
)
from keepstep.errors import ConfigError
from keepstep.model.layout import Layout, TensorSpec, lay_out

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from keepstep.edge.torch.numbers.copied import KnownBad

RNG = "rng"
LOADERS = "loaders"
# random states and loaders, which are always kept, and names of our own in checkpoints
RESERVED = {RNG, LOADERS, ABOUT, BESIDE, "keepstep", "ranks"}


_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError, RecursionError)


@dataclass(frozen=True, slots=True)
class State:
    """One rank's state at one moment: tensors by reference, everything else already pickled."""

    copies: tuple[CopyOrder, ...]
    sections: tuple[bytes, ...]
    layout: Layout
    # by `copies`, of what is counted: the counters that it had when it was gathered
    versions: tuple[list[int], ...]
    remark: str = ""
    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def turn_of(self, update: object) -> int | None:
        """The number of that optimizer in turns; None for anything else."""
        numbers = (n for n, optimizer in enumerate(self.optimizers) if optimizer is update)
        return next(numbers, None)

    @property
    def items(self) -> tuple[StateItem, ...]:
        """In the order of the layout."""
        return tuple(item for copies in self.copies for item in copies.items)

    @property
    def objects(self) -> bytes:
        """The tree, pickled."""
        return b"".join(self.sections)

    @property
    def payload_bytes(self) -> int:
        return self.layout.objects_offset + sum(map(len, self.sections))


def _address(tensor: torch.Tensor) -> int:
    return local_part(tensor).data_ptr() if is_dtensor(tensor) else tensor.data_ptr()


class Values(dict[str, Any]):
    """The plain values by name. Only those that `protect` was given: another one would not be
    restored, and without one of them no saved state would fit."""

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self._check(name)
        return self[name]

    def update(self, *others: Any, **named: Any) -> None:
        changes: dict[str, Any] = dict(*others, **named)
        for name in changes:
            self._check(name)
        super().update(changes)

    def __ior__(self, other: Any) -> Values:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __delitem__(self, name: str) -> None:
        raise self._stays(name)

    def pop(self, name: str, *default: Any) -> Any:
        raise self._stays(name)

    def popitem(self) -> Any:
        raise self._stays("any of them")

    def clear(self) -> None:
        raise self._stays("any of them")

    def _check(self, name: str) -> None:
        if name not in self:
            raise ConfigError(
                f"job.state: expected one of {sorted(self)}, found {name!r}; name it in "
                "protect() first"
            )

    def _stays(self, name: str) -> ConfigError:
        return ConfigError(
            f"job.state: expected all of {sorted(self)} to stay, found {name!r} to be removed; set "
            "it to None instead"
        )


@dataclass
class Protected:
    """Everything a user protects, by name. `objects` are parts that were given by a name of their
    own; `values` all the rest, changed through `job.state`; parts may be inside them, too.

    `optimizers` are those of the beginning: one that joins later has no fence.
    """

    objects: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    # lazily copied once, found torn, copied at the boundary since
    eager_names: set[str] = field(default_factory=set)
    lazy: bool = True
    # by id: optimizers whose updates may come without their hooks, and why
    unfenced: dict[int, str] = field(default_factory=dict)
    _untold: dict[str, str] = field(default_factory=dict)  # likewise, by path
    # names of types that a saved state may have besides those of the live one
    trusted: tuple[str, ...] = ()
    used_gradients: UsedGradients = field(default_factory=UsedGradients)
    known_bad: KnownBad | None = None  # None: nobody asks what is finite
    buckets: Buckets | None = None  # None: sums have one order
    loaders: Loaders = field(default_factory=lambda: Loaders(ForeignDraws()))
    # by name, with what they were made from
    _specs: dict[str, tuple[Any, TensorSpec]] = field(default_factory=dict)
    _layout: Layout = field(default_factory=lambda: lay_out([]))
    _numbers: PickledNumbers = field(default_factory=PickledNumbers)
    _plan: StatePlan | None = None
    _made_for: tuple[Any, ...] = ()  # what the plan rests on besides the parts
    _kinds: set[Any] = field(default_factory=set)  # of what was ever pickled
    _newcomers: Newcomers | None = None
    _about: tuple[Any, dict[str, Any]] | None = None
    # what the program that saved the loaded state was made with
    made_with_before: MadeWith = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.parts()
        self.optimizers = [p for p in parts.values() if isinstance(p, torch.optim.Optimizer)]
        self.made_with = made_with(parts)
        self.groups_at_first = {id(o): len(o.param_groups) for o in self.optimizers}

    @classmethod
    def of(cls, stateful: Mapping[str, Any], lazy: bool, trusted: Sequence[str] = ()) -> Protected:
        """Raises ConfigError on a reserved name, on nothing to protect, or on what would not come
        back."""
        if not stateful:
            raise ConfigError(
                "protect() expected at least one thing to protect, such as model=model, and "
                "found none"
            )
        for name in sorted(RESERVED & stateful.keys()):
            raise ConfigError(
                f"the name {name!r} is taken (reserved: {', '.join(sorted(RESERVED))}); give "
                "yours another one"
            )
        check_names(stateful)
        values = Values((k, v) for k, v in stateful.items() if kind_of(v) == "value")
        objects = {k: dict(parts_inside(k, v))[k] for k, v in stateful.items() if k not in values}
        protected = cls(objects, values, lazy=lazy, trusted=tuple(trusted))
        protected.check_values()
        return protected

    def parts(self) -> dict[str, Any]:
        """Whatever has a state of its own to load, by its path, as it is at this moment."""
        parts = dict(self.objects)
        for name, value in self.values.items():
            parts.update(parts_inside(name, value))
        return parts

    def check_values(self) -> None:
        """Raises ConfigError naming the value that cannot be kept."""
        paths = {id(part): path for path, part in self.parts().items()}
        for name, value in self.values.items():
            pickler = TreePickler(Kept(), {}, paths)
            try:
                pickler.states_and_values({}, value)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
            except _UNPICKLABLE as error:
                raise _cannot_be_pickled(name, error) from error

    def about(self) -> dict[str, Any]:
        """What each thing is, in JSON's types: compared before anything is loaded."""
        parts = self.parts()
        optimizers = {k: v for k, v in parts.items() if isinstance(v, torch.optim.Optimizer)}
        buffers = {k: _buffers(v) for k, v in parts.items() if isinstance(v, torch.nn.Module)}
        kinds = {k: kind_of(v) for k, v in {**self.values, **parts}.items()}
        groups = {
            k: [[id(p) for p in group["params"]] for group in o.param_groups]
            for k, o in optimizers.items()
        }
        classes = class_names(parts)
        found = (kinds, classes, buffers, groups)
        if self._about is None or self._about[0] != found:
            names = tensor_names(parts)
            about = {
                "kinds": kinds,
                "classes": classes,
                "made_with": self.made_with,
                "optimizer_parameters": {
                    k: [[str(p.dtype), list(p.shape)] for p in parameters_of(o)]
                    for k, o in optimizers.items()
                },
                "parameter_names": {
                    k: [[names.get(id(p), "") for p in g["params"]] for g in o.param_groups]
                    for k, o in optimizers.items()
                },
                "buffers": buffers,
            }
            self._about = (found, about)
        return self._about[1]

    def tree(self) -> dict[str, Any]:
        """The nested state: RNG first, then the parts by their paths, then the values."""
        parts = self.parts()
        tree: dict[str, Any] = {RNG: read_rng()}
        for path, part in parts.items():
            tree[path] = state_of(part)
        grouped = {} if self.buckets is None else self.buckets.known
        tree[BESIDE] = read_beside(parts, self.used_gradients, grouped)
        return {**tree, **self.values, LOADERS: self.loaders.state_dict()}

    @collector_paused()
    def gather(self) -> State:
        """Name every tensor and pickle the rest. Runs on the trainer's thread; copies no tensor,
        leaves random states as they were. What seldom changes is asked for only when it has."""
        rng = read_rng()
        parts = self.parts()
        for optimizer in self.optimizers:
            if id(optimizer) not in self.unfenced and (why := why_unfenced(optimizer)):
                self._has_no_fence(optimizer, why)
        try:
            plan = self._plan_for(parts)
            beside = plan.beside(self.used_gradients, self.buckets)
            moving = {RNG: tensors_of(rng), **plan.moving_states()}
            moving[LOADERS] = self.loaders.state_dict()
            kept = beside.kept.after()
            names: dict[int, str] = {}
            name_tensors({**moving, **self.values}, "", names)
            pickler = TreePickler(kept, names, {id(part): path for path, part in parts.items()})
            sections = (
                plan.objects,
                beside.objects,
                self._numbers.of(rng, RNG),
                pickler.states_and_values(moving, dict(self.values)),
            )
        except _UNPICKLABLE as error:
            self.check_values()
            states = {k: v for k, v in self.tree().items() if k not in self.values}
            raise _cannot_be_pickled(_unpicklable(states), error) from error
        except ConfigError:
            self.check_values()
            raise
        asked_strangers = bool(plan.asks_strangers or self.values or moving[LOADERS])
        if asked_strangers:
            put_back(rng)
        others = [*beside.kept.items, *kept.items]
        return self._remarked(self._state(plan, others, sections, asked_strangers))

    def updates(self, optimizer: torch.optim.Optimizer) -> None:
        """In its pre-step hook."""
        if id(optimizer) not in self.unfenced and (why := why_this_update()):
            self._has_no_fence(optimizer, why)

    def _has_no_fence(self, optimizer: torch.optim.Optimizer, why: str) -> None:
        self.unfenced[id(optimizer)] = why
        self._untold[path_of(self.parts(), optimizer)] = why

    def _remarked(self, state: State) -> State:
        if self._newcomers is None:
            # What is live at first is what a new process has: to load is to know already.
            first = state.sections  # and not the tensors
            known = self._vocabulary(lambda: uses_of(b"".join(first), SECTIONS))
            self._newcomers = Newcomers(known)
        untold, self._untold = self._untold, {}
        found = (
            self._newcomers.remark(self._kinds, lambda: state.objects, SECTIONS),
            unfenced_remark(untold),
        )
        remark = ". ".join(filter(None, found))
        return replace(state, remark=remark) if remark else state

    def vocabulary(self, calls: Mapping[Name, Call] | None = None) -> Own:
        """What a saved state may consist of: what this one does. `calls`: see `Known`."""
        return self._vocabulary(lambda: uses_of(self.gather().objects, SECTIONS), calls)

    def _vocabulary(
        self, uses: Callable[[], Uses], calls: Mapping[Name, Call] | None = None
    ) -> Own:
        parts = (bare(part) if isinstance(part, torch.nn.Module) else part for part in self._all())
        return Own(uses, parts, self.trusted, calls)

    def _all(self) -> Iterable[Any]:
        return (*self.parts().values(), *self.values.values())

    def forget_plan(self) -> None:
        """The next gather asks everything anew."""
        self._plan = None

    def _plan_for(self, parts: dict[str, Any]) -> StatePlan:
        """The last plan where it still holds."""
        kinds = {name: kind_of(value) for name, value in self.values.items()}
        made_for = (kinds, set(self.eager_names), self.lazy, dict(self.unfenced))
        plan = self._plan
        if plan is not None and made_for == self._made_for and plan.holds(parts):  # noqa: SIM102
            if plan.watches(self.optimizers) or plan.kept.still == self._still_addresses():
                return plan
        self.forget_plan()
        kept = Kept(
            self._still_addresses(),
            self.eager_names,
            self._specs,
            kinds=self._kinds,
            frozen=self._frozen_addresses(),
        )
        self._plan = plan = StatePlan.make(parts, self.about(), kept)
        self._made_for = made_for
        return plan

    def _state(
        self,
        plan: StatePlan,
        others: Sequence[StateItem],
        sections: tuple[bytes, ...],
        asked_strangers: bool,
    ) -> State:
        """`others`: what was found behind what is in the plan. `asked_strangers`: what is kept may
        have been written to since it was looked at."""
        first = len(plan.kept.items)
        is_known = plan.copies is not None and [i.spec for i in others] == [
            s.spec for s in self._layout.segments[first:]
        ]
        if not is_known:
            specs = [item.spec for item in (*plan.kept.items, *others)]
            if specs != [segment.spec for segment in self._layout.segments]:
                self._layout = lay_out(specs)
        segments = self._layout.segments
        if plan.copies is None:
            watched = () if plan.watch is None else plan.watch.tensors
            plan.copies = CopyOrder.of(plan.kept.items, segments[:first], watched)
        copies = (plan.copies, CopyOrder.of(others, segments[first:]))
        known = plan.copies.versions() if asked_strangers else plan.versions()
        versions = (known, copies[1].versions())
        optimizers = tuple(self.optimizers)
        return State(copies, sections, self._layout, versions, optimizers=optimizers)

    def meshes(self) -> dict[MeshKey, DeviceMesh]:
        """Every mesh that a protected DTensor is on."""
        found: dict[MeshKey, DeviceMesh] = {}
        for tensor in _all_tensors(self.tree().values()):
            if is_dtensor(tensor):
                found.setdefault(mesh_key(tensor.device_mesh), tensor.device_mesh)
        return found

    def _still_addresses(self) -> dict[int, tuple[int, int]]:
        """With the turn of each: the number of the optimizer and the parameter that it is updated
        with."""
        if not self.lazy:
            return {}
        # Only what a torch optimizer owns is known to stand still until its pre-step hook has run.
        turns: dict[int, tuple[int, int]] = {}
        for number, optimizer in enumerate(self.optimizers):
            if id(optimizer) in self.unfenced:
                continue
            index_of = {}
            for index, parameter in enumerate(parameters_of(optimizer)):
                index_of[id(parameter)] = index
                turns.setdefault(_address(parameter), (number, index))
            for key, state in optimizer.state.items():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        turns.setdefault(_address(value), (number, index_of.get(id(key), 0)))
        return turns

    def parameter_addresses(self) -> set[int]:
        """Of all parameters that there are, and of what optimizers update besides."""
        parts = self.parts().values()
        modules = [part for part in parts if isinstance(part, torch.nn.Module)]
        found = {_address(p) for module in modules for p in module.parameters()}
        found |= {_address(part) for part in parts if isinstance(part, torch.nn.Parameter)}
        return found | {_address(p) for o in self.optimizers for p in parameters_of(o)}

    def _frozen_addresses(self) -> frozenset[int]:
        """Of large parameters that do not learn."""
        if not self.lazy:
            return frozenset()
        return frozenset(
            _address(parameter)
            for part in self.parts().values()
            if isinstance(part, torch.nn.Module)
            for parameter in part.parameters()
            if not parameter.requires_grad and parameter.nbytes >= FEWEST_BYTES
        )


def tensor_names(parts: Mapping[str, Any]) -> dict[int, str]:
    """The names of modules' parameters and of plain tensors, by their id."""
    names: dict[int, str] = {}
    for path, part in parts.items():
        if isinstance(part, torch.nn.Module):
            for name, parameter in bare(part).named_parameters():
                names.setdefault(id(parameter), f"{path}.{name}")
        elif isinstance(part, torch.Tensor):
            names.setdefault(id(part), path)
    return names


def _buffers(part: torch.nn.Module) -> list[str]:
    return [name for name, _ in bare(part).named_buffers(remove_duplicate=False)]


def _all_tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    """However deep, and once where something holds itself."""
    waiting, seen = list(values), set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value


def _cannot_be_pickled(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"{name}: expected something that can be pickled, found: {error}")


def _unpicklable(states: dict[str, Any]) -> str:
    """Which of the protected things cannot be pickled."""
    for name, value in states.items():
        try:
            TreePickler(Kept(), {}, {}).states(value)
        except _UNPICKLABLE:
            return name
    return "the state"
