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

from keepstep.edge.torch.beside import UsedGradients, read_beside
from keepstep.edge.torch.dtensors import is_dtensor
from keepstep.edge.torch.foreign_draws import ForeignDraws
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
from keepstep.errors import ConfigError
from keepstep.model.layout import Layout, TensorSpec, lay_out

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RNG = "rng"
LOADERS = "loaders"
# random states and loaders, which are always kept, and names of our own in checkpoints
RESERVED = {RNG, LOADERS, ABOUT, BESIDE, "keepstep", "ranks"}


@dataclass(frozen=True, slots=True)
class State:
    """One rank's state at one moment: tensors by reference, everything else already pickled."""

    copies: tuple[CopyOrder, ...]
    sections: tuple[bytes, ...]
    layout: Layout
    remark: str = ""

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
    # names of types that a saved state may have besides those of the live one
    trusted: tuple[str, ...] = ()
    used_gradients: UsedGradients = field(default_factory=UsedGradients)
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
            except (pickle.PicklingError, AttributeError, TypeError) as error:
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
        tree[BESIDE] = read_beside(parts, self.used_gradients)
        return {**tree, **self.values, LOADERS: self.loaders.state_dict()}

    def gather(self) -> State:
        """Name every tensor and pickle the rest. Runs on the trainer's thread; copies no tensor,
        leaves random states as they were. What seldom changes is asked for only when it has."""
        rng = read_rng()
        parts = self.parts()
        try:
            plan = self._plan_for(parts)
            beside = plan.beside(self.used_gradients)
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
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.check_values()
            states = {k: v for k, v in self.tree().items() if k not in self.values}
            raise _cannot_be_pickled(_unpicklable(states), error) from error
        except ConfigError:
            self.check_values()
            raise
        if plan.asks_strangers or self.values or moving[LOADERS]:
            put_back(rng)
        others = [*beside.kept.items, *kept.items]
        return self._remarked(self._state(plan, others, sections))

    def _remarked(self, state: State) -> State:
        if self._newcomers is None:
            # What is live at first is what a new process has: to load is to know already.
            first = state.sections  # and not the tensors
            known = self._vocabulary(lambda: uses_of(b"".join(first), SECTIONS))
            self._newcomers = Newcomers(known)
        remark = self._newcomers.remark(self._kinds, lambda: state.objects, SECTIONS)
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
        made_for = (kinds, set(self.eager_names), self.lazy)
        plan = self._plan
        if plan is not None and made_for == self._made_for and plan.holds(parts):  # noqa: SIM102
            if plan.watches(self.optimizers) or plan.kept.still == self._still_addresses():
                return plan
        self.forget_plan()
        kept = Kept(self._still_addresses(), self.eager_names, self._specs, kinds=self._kinds)
        self._plan = plan = StatePlan.make(parts, self.about(), kept)
        self._made_for = made_for
        return plan

    def _state(
        self, plan: StatePlan, others: Sequence[StateItem], sections: tuple[bytes, ...]
    ) -> State:
        """`others`: what was found behind what is in the plan."""
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
            plan.copies = CopyOrder.of(plan.kept.items, segments[:first])
        return State((plan.copies, CopyOrder.of(others, segments[first:])), sections, self._layout)

    def meshes(self) -> dict[MeshKey, DeviceMesh]:
        """Every mesh that a protected DTensor is on."""
        found: dict[MeshKey, DeviceMesh] = {}
        for tensor in _all_tensors(self.tree().values()):
            if is_dtensor(tensor):
                found.setdefault(mesh_key(tensor.device_mesh), tensor.device_mesh)
        return found

    def _still_addresses(self) -> frozenset[int]:
        if not self.lazy:
            return frozenset()
        # Only what a torch optimizer owns is known to stand still until its pre-step hook has run.
        addresses = set()
        for optimizer in self.optimizers:
            for parameter in parameters_of(optimizer):
                addresses.add(_address(parameter))
            for state in optimizer.state.values():
                addresses.update(_address(v) for v in state.values() if isinstance(v, torch.Tensor))
        return frozenset(addresses)


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
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _all_tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _all_tensors(value)


def _cannot_be_pickled(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"{name}: expected something that can be pickled, found: {error}")


def _unpicklable(states: dict[str, Any]) -> str:
    """Which of the protected things cannot be pickled."""
    for name, value in states.items():
        try:
            TreePickler(Kept(), {}, {}).states(value)
        except (pickle.PicklingError, AttributeError, TypeError):
            return name
    return "the state"
