"""Fits: whether a saved state has the shape of what is protected, and what must be made first.

Comes in: what the snapshot says of itself, and the live parts. Goes out: nothing but an error that
names tensors, and says which side is saved and which is live. Shapes are the snapshot's where the
program may well have changed them while it trained: buffers grow and come into being, parameter
groups are added. Everything else that differs is another program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.edge.torch.made_with import is_one_class
from keepstep.edge.torch.parts import bare
from keepstep.edge.torch.state import Protected, tensor_names
from keepstep.errors import LayoutError
from keepstep.model.layout import Layout, TensorSpec, difference

THREE_WAYS = (
    "Nothing is loaded and nothing is lost. Make the program as it was, or use another job name, "
    "or start over with KEEPSTEP_FRESH=1"
)


@dataclass(frozen=True, slots=True)
class Growth:
    """What an optimizer's groups must become: as many as were saved, `added` of them made of these
    live parameters."""

    groups: int
    added: tuple[tuple[torch.Tensor, ...], ...] = ()


def check(protected: Protected, about: Mapping[str, Any], layout: Layout) -> None:
    """Raises LayoutError naming what was saved and what is live."""
    check_kinds(protected, about)
    parts = protected.parts()
    strict = tuple(f"{p}." for p, part in parts.items() if isinstance(part, torch.nn.Module))
    exact = {path for path, part in parts.items() if isinstance(part, torch.Tensor)}
    live = _only(protected.gather().layout, strict, exact)
    saved = _only(layout, strict, exact)
    lax = buffer_names(protected.about()) | buffer_names(about)
    _refuse(difference(_without_grown(live, saved, lax), _without_grown(saved, live, lax)))


def check_kinds(protected: Protected, about: Mapping[str, Any]) -> None:
    """The part of `check` that needs no layout: which things there are, the optimizers' parameters,
    and the classes of optimizers and schedulers. Raises LayoutError."""
    live = protected.about()
    problems = []
    for name in sorted(live["kinds"].keys() | about["kinds"].keys()):
        now, saved = (kinds.get(name, "nothing") for kinds in (live["kinds"], about["kinds"]))
        if now != saved:
            problems.append(f"{name}: saved {saved}, live {now}")
    problems += _class_problems(live["classes"], about.get("classes", {}))
    for name in live["optimizer_parameters"]:
        if name in about["optimizer_parameters"]:
            problems += _parameter_problems(protected, name, live, about)
    _refuse(problems)


def _class_problems(
    live: Mapping[str, Sequence[str]], saved: Mapping[str, Sequence[str]]
) -> list[str]:
    """What another class makes of a state is not what was saved, even where it loads it. Snapshots
    that do not say are taken."""
    return [
        f"{name}: saved by {'.'.join(saved[name])}, live {'.'.join(now)}"
        for name, now in live.items()
        if name in saved and not is_one_class(now, saved[name])
    ]


def growth(protected: Protected, name: str, about: Mapping[str, Any]) -> Growth | None:
    """How the optimizer of that path becomes as it was saved; None when it is so already, or cannot
    become so."""
    saved: Sequence[Sequence[str]] = about.get("parameter_names", {}).get(name, ())
    live: Sequence[Sequence[str]] = protected.about()["parameter_names"][name]
    shared = min(len(saved), len(live))
    same_so_far = [list(g) for g in saved[:shared]] == [list(g) for g in live[:shared]]
    if not saved or len(saved) == len(live) or not same_so_far:
        return None
    parts = protected.parts()
    if len(saved) < len(live):
        # Those that were added since this process began: a later step adds them once more.
        first = protected.groups_at_first.get(id(parts[name]), len(live))
        return Growth(len(saved)) if len(saved) >= first else None
    tensors = _by_name(parts)
    added = []
    for group in saved[shared:]:
        if not all(name in tensors for name in group):
            return None
        added.append(tuple(tensors[name] for name in group))
    return Growth(len(saved), tuple(added))


def grow(optimizer: torch.optim.Optimizer, wanted: Growth) -> None:
    """Make its groups as many as were saved; loading gives them their options."""
    del optimizer.param_groups[wanted.groups :]
    for parameters in wanted.added:
        optimizer.add_param_group({"params": list(parameters)})


def _by_name(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    by_id = tensor_names(parts)
    found = {}
    for part in parts.values():
        tensors: Sequence[torch.Tensor] = ()
        if isinstance(part, torch.nn.Module):
            tensors = list(bare(part).parameters())
        elif isinstance(part, torch.Tensor):
            tensors = [part]
        for tensor in tensors:
            found[by_id[id(tensor)]] = tensor
    return found


def _parameter_problems(
    protected: Protected, name: str, live: Mapping[str, Any], about: Mapping[str, Any]
) -> list[str]:
    now = _described(live, name)
    saved = _described(about, name)
    wanted = growth(protected, name, about)
    if wanted is not None:
        now = now[: len(saved)] + [_words(t, n) for t, n in _made(protected, wanted)]
    if _same(now, saved) and (wanted is not None or _group_sizes(live, name, about)):
        return []
    count = f"{name}: saved {len(saved)} parameters, live {len(now)}"
    for index in range(max(len(saved), len(now))):
        a, b = (side[index] if index < len(side) else "none" for side in (saved, now))
        if index >= min(len(saved), len(now)) or not _same([a], [b]):
            hint = "" if a != "none" and b != "none" else _hint(a)
            return [f"{count}; the first difference is number {index}: saved {a}, live {b}{hint}"]
    groups = (about["parameter_names"][name], live["parameter_names"][name])
    sizes = [[len(group) for group in side] for side in groups]
    return [f"{name}: saved groups of {sizes[0]} parameters, live {sizes[1]}"]


def _hint(saved: str) -> str:
    if saved == "none":
        return "; the program has made a group that the snapshot lacks"
    return (
        "; a group that is added while training is made anew when a protected module has its "
        "parameters: add the layers or the group that the run had gained before protect()"
    )


def _made(protected: Protected, wanted: Growth) -> list[tuple[torch.Tensor, str]]:
    names = tensor_names(protected.parts())
    return [(t, names.get(id(t), "")) for group in wanted.added for t in group]


def _words(tensor: torch.Tensor, name: str) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {name}".rstrip()


def _described(about: Mapping[str, Any], name: str) -> list[str]:
    shapes = about["optimizer_parameters"][name]
    names = [n for group in about.get("parameter_names", {}).get(name, ()) for n in group]
    names += [""] * (len(shapes) - len(names))
    return [
        f"{dtype.removeprefix('torch.')}{list(shape)} {n}".rstrip()
        for (dtype, shape), n in zip(shapes, names, strict=True)
    ]


def _same(one: Sequence[str], other: Sequence[str]) -> bool:
    """Names count where both sides have them."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        shape_a, _, name_a = a.partition("] ")
        shape_b, _, name_b = b.partition("] ")
        if shape_a.rstrip("]") != shape_b.rstrip("]") or (name_a and name_b and name_a != name_b):
            return False
    return True


def _group_sizes(live: Mapping[str, Any], name: str, about: Mapping[str, Any]) -> bool:
    """Whether the groups have the same sizes, as far as it was saved."""
    saved = about.get("parameter_names", {}).get(name)
    if saved is None:
        return True
    return [len(g) for g in saved] == [len(g) for g in live["parameter_names"][name]]


def buffer_names(about: Mapping[str, Any]) -> set[str]:
    """Of all modules: their shapes are whatever was saved."""
    return {f"{path}.{name}" for path, names in about.get("buffers", {}).items() for name in names}


def _only(layout: Layout, prefixes: tuple[str, ...], exact: set[str]) -> Layout:
    kept = tuple(
        s for s in layout.segments if s.spec.name.startswith(prefixes) or s.spec.name in exact
    )
    return Layout(kept, layout.objects_offset)


def _without_grown(layout: Layout, other: Layout, lax: set[str]) -> Layout:
    """But for buffers, which may be of any shape and type, or only on one side."""
    there = {s.spec.name: s.spec for s in other.segments}
    kept = tuple(
        s
        for s in layout.segments
        if s.spec.name not in lax or not _may_become(s.spec, there.get(s.spec.name))
    )
    return Layout(kept, layout.objects_offset)


def _may_become(one: TensorSpec, other: TensorSpec | None) -> bool:
    return one.shard is None and (other is None or other.shard is None)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise LayoutError(
            "the saved state does not fit the program: " + "; ".join(problems) + f". {THREE_WAYS}"
        )
