"""Watched run: a step that is run again with eyes on every module.

Comes in: modules by their names. Goes out: where a value that is not finite first came out of what
was finite, in forward or in backward, and a digest of this rank's own gradients, before anything of
its peers is added. Hooks only look: what the step computes is bit for bit what it computes without.

The digest is of gradients of before the first update, and there is none where a sum came before
them (a batch norm over ranks, say): ranks that have changed places add in another order, and what
is wrong with one of them is in the sum.

Beside it stand a few sums of the same gradients with random signs, which say how far apart two runs
are that do not come to the same bits (`core/numbers/repeats.py`).

Of what layers give in types of few bits (half, bfloat16, float8), and of the gradients that they
send back and have of their parameters, it is counted how much has no place there: values at the end
of the type's range or beyond, and those below its least normal number.

How it is found: a module's inputs and outputs are looked at as they pass, and so are the gradients
that arrive at its outputs, leave at its inputs and end in its parameters. The first whose inputs
are finite and whose outputs are not is the origin; the innermost one, for it is left first.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from keepstep.edge.torch.numbers.finite import can_be_bad, is_narrow, norm_of, plain, tensors_in
from keepstep.edge.torch.parts import bare
from keepstep.model.numbers import SKETCH_SUMS, Origin, RangeCount

BEHIND = "behind the model"  # a loss, say
SKETCH_AT_ONCE = 1 << 18  # values: so much memory is taken for their signs
BACKWARD_OF = "the backward pass of "
NOTABLE_SHARE = 0.5  # of a layer's values that are too small; a few are in any softmax


class WatchedRun:
    """Of one body, from when this is made until `end`. `modules`: those that are protected."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._found: Origin | None = None
        self._behind: Origin | None = None  # what no module accounts for
        self.bad_inputs: list[str] = []  # of a whole model, made by nobody here
        self._handles: list[Any] = []
        self._inputs_finite: dict[str, bool] = {}
        self._arrived: dict[str, bool] = {}  # whether all gradients at its outputs were finite
        self._has_arrived = False  # any gradient anywhere
        self._suspect = ""  # the operation whose result was first seen to be bad
        self._digests: dict[str, list[str]] = defaultdict(list)
        self._ranges: dict[str, RangeCount] = {}  # by layer, in the order in which they give
        self._is_its_own = True  # what is computed now depends on no peer
        self._norms: dict[str, float] = defaultdict(float)
        self._sketch = torch.zeros(SKETCH_SUMS, dtype=torch.float64)
        for path, root in modules.items():
            self._watch(path, bare(root))

    def _watch(self, path: str, root: torch.nn.Module) -> None:
        for name, module in root.named_modules():
            full = f"{path}.{name}" if name else path
            is_root = module is root
            before = partial(self._before, full, is_root)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(partial(self._after, full)))
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    look = partial(self._gradient, full, f"{full}.{key}", type(module).__name__)
                    self._handles.append(parameter.register_hook(look))

    def end(self) -> None:
        """No more looks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def gives(self) -> None:
        """This rank gives something to a sum over ranks. What it gives of gradients that are there
        comes back into none of them before an update; what it gives before may come back into all.
        On any thread."""
        self._is_its_own = self._is_its_own and bool(self._digests)

    def updates(self) -> None:
        """Gradients that follow are of parameters that sums over ranks have made."""
        self._is_its_own = False

    # -- what comes of it

    @property
    def origin(self) -> Origin | None:
        """Where it was first not finite; None: nowhere, or in what came in."""
        return self._found or self._behind

    @property
    def narrow(self) -> RangeCount | None:
        """The first layer whose values went beyond their type's range; where there is none, the one
        that has the greatest part of its values below the least normal number, if most are."""
        ranges = list(self._ranges.values())
        over = next((found for found in ranges if found.over), None)
        small = max(ranges, key=lambda found: found.under / found.values, default=None)
        if over is None and small is not None and small.under > NOTABLE_SHARE * small.values:
            return small
        return over

    @property
    def digest(self) -> str:
        """Of all gradients that depend on no peer, in the order of their names; empty when there
        were none."""
        if not self._digests:
            return ""
        joined = repr(sorted((name, found) for name, found in self._digests.items()))
        return hashlib.blake2b(joined.encode(), digest_size=16).hexdigest()

    @property
    def sketch(self) -> tuple[float, ...]:
        """Sums of the same gradients with random signs, the same in each run."""
        return tuple(float(value) for value in self._sketch) if self._digests else ()

    @property
    def norm(self) -> float | None:
        """Of this rank's own gradients; None when there were none."""
        return math.sqrt(math.fsum(self._norms.values())) if self._norms else None

    @property
    def gave_bad(self) -> bool:
        return any(not math.isfinite(square) for square in self._norms.values())

    # -- hooks

    def _before(self, name: str, is_root: bool, module: Any, args: Any, kwargs: Any) -> None:
        finite = True
        for path, tensor in tensors_in((args, kwargs)):
            if _is_bad(tensor):
                finite = False
                self._suspect = self._suspect or _operation(tensor)
                if is_root and tensor.grad_fn is None:
                    self.bad_inputs.append(f"input {path} of {name}")
            _on_gradient(tensor, partial(self._leaves, name, type(module).__name__))
        self._inputs_finite[name] = finite

    def _after(self, name: str, module: Any, args: Any, output: Any) -> None:
        kind = type(module).__name__
        for _, tensor in tensors_in(output):
            self._count_range(name, plain(tensor), self._inputs_finite.get(name, True))
            if self._found is None and _is_bad(tensor) and self._inputs_finite.get(name, True):
                operation = kind if not self._suspect else f"{kind}, {self._suspect}"
                self._found = Origin(name, operation, "forward")
            _on_gradient(tensor, partial(self._arrives, name, kind))

    def _count_range(self, name: str, values: torch.Tensor, came_in_right: bool) -> None:
        """What came in bad comes out bad, and says nothing of the range."""
        if not (is_narrow(values.dtype) and values.numel() and came_in_right):
            return
        kind, sizes = torch.finfo(values.dtype), values.float().abs()
        over = int((~(sizes < kind.max)).sum())  # NaN is no less than anything
        under = int(((sizes > 0) & (sizes < kind.tiny)).sum())
        dtype = str(values.dtype).removeprefix("torch.")
        before = self._ranges.get(name, RangeCount(name, dtype, 0, 0, 0))
        self._ranges[name] = RangeCount(
            *(name, dtype, before.values + values.numel()),
            *(before.over + over, before.under + under),
        )

    def _arrives(self, name: str, kind: str, gradient: torch.Tensor) -> None:
        """At an output of that module, before it leaves, at its input, the one that made it."""
        is_bad = _is_bad(gradient)
        if is_bad and self._behind is None and not self.bad_inputs:
            layer = f"behind {name}" if self._has_arrived else BEHIND
            self._behind = Origin(layer, "what uses its output", "backward")
        self._has_arrived = True
        self._arrived[name] = self._arrived.get(name, True) and not is_bad

    def _leaves(self, name: str, kind: str, gradient: torch.Tensor) -> None:
        """At an input of that module."""
        arrived_right = self._arrived.get(name, False)
        self._count_range(BACKWARD_OF + name, plain(gradient), arrived_right)
        if self._found is None and _is_bad(gradient) and arrived_right:
            self._found = Origin(name, kind, "backward")

    def _gradient(self, name: str, parameter: str, kind: str, gradient: torch.Tensor) -> None:
        local = plain(gradient)
        self._count_range(BACKWARD_OF + name, local, self._arrived.get(name, True))
        if can_be_bad(local):
            norm = norm_of([local])
            self._norms[parameter] += norm * norm
            if self._found is None and not math.isfinite(norm) and self._arrived.get(name, True):
                self._found = Origin(name, f"{kind}, gradient of {parameter}", "backward")
        if not self._is_its_own:
            return
        host = local.cpu().contiguous()
        self._sketch += _signed_sums(parameter, host)
        raw = ctypes.string_at(host.data_ptr(), host.nbytes) if host.numel() else b""
        self._digests[parameter].append(hashlib.blake2b(raw, digest_size=16).hexdigest())


def _signed_sums(name: str, values: torch.Tensor) -> torch.Tensor:
    """Sums of these values with signs that follow from the name alone. Draws from a generator of
    its own, so that the program's draws stay the same."""
    flat = values.flatten()
    if not flat.is_floating_point():
        return torch.zeros(SKETCH_SUMS, dtype=torch.float64)
    drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    found = torch.zeros(SKETCH_SUMS, dtype=torch.float64)
    for begin in range(0, flat.numel(), SKETCH_AT_ONCE):
        part = flat[begin : begin + SKETCH_AT_ONCE].double()
        signs = torch.randint(0, 2, (SKETCH_SUMS, part.numel()), generator=drawn)
        found += (2 * signs - 1).double() @ part
    return found


def _is_bad(tensor: torch.Tensor) -> bool:
    local = plain(tensor)
    return can_be_bad(local) and bool(local.numel()) and not math.isfinite(norm_of([local]))


def _on_gradient(tensor: torch.Tensor, look: Callable[[torch.Tensor], None]) -> None:
    if tensor.requires_grad and not tensor.is_leaf:
        tensor.register_hook(look)


def _operation(tensor: torch.Tensor) -> str:
    """What made it, as autograd calls it: `log` of LogBackward0."""
    made_by = "" if tensor.grad_fn is None else tensor.grad_fn.name()
    return made_by.partition("Backward")[0].rpartition("::")[2].lower()
