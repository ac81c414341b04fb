"""Made with: which options a program gave its optimizers and schedulers, and which of its edits
have no effect.

They are restored with the options that were saved: schedulers, and programs by hand, change them
while training. So an edit of the program between two lives is nothing that a restore heeds. It is
told by comparing what the two lives made them with, as it was at `protect`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

# Of each optimizer and scheduler by its path: of each group (a scheduler has one) its options by
# name, as text.
MadeWith = Mapping[str, Sequence[Mapping[str, str]]]

SHOWN_EDITS = 3
# `base_lrs` are the groups' `initial_lr` once more.
NOT_OPTIONS = {"params", "param_names", "base_lrs"}
SCRIPT = "__main__"


def made_with(parts: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """The options of all optimizers and schedulers as they are now: plain values and tensors of one
    number."""
    return {
        path: [_options(group) for group in _groups(part)]
        for path, part in parts.items()
        if isinstance(part, (torch.optim.Optimizer, LRScheduler))
    }


def unheeded(given: MadeWith, before: MadeWith, now: MadeWith) -> str:
    """One sentence about the options that the program gives otherwise than the one `before`, and
    that are not so `now` that the saved ones are loaded; empty when there are none."""
    edits = list(dict.fromkeys(_edits(given, before, now)))
    if not edits:
        return ""
    more = f"; and {len(edits) - SHOWN_EDITS} more" if len(edits) > SHOWN_EDITS else ""
    return (
        f"{'; '.join(edits[:SHOWN_EDITS])}{more}: what was saved holds; to have it otherwise, set "
        "it after protect(), or start over with KEEPSTEP_FRESH=1"
    )


def class_names(parts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Module and name of the optimizers' and schedulers' classes."""
    return {
        path: [type(part).__module__, type(part).__qualname__]
        for path, part in parts.items()
        if isinstance(part, (torch.optim.Optimizer, LRScheduler))
    }


def is_one_class(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two of `class_names` may well be one: a class may move from the script into a module,
    and within its package."""
    packages = {module.partition(".")[0] for module, _ in (one, other)}
    return one[1] == other[1] and (len(packages) == 1 or SCRIPT in packages)


def _edits(given: MadeWith, before: MadeWith, now: MadeWith) -> Iterator[str]:
    for path in (p for p in given if p in before and p in now):
        for ours, theirs, held in zip(given[path], before[path], now[path], strict=False):
            for key in _comparable(ours, theirs):
                if ours[key] not in (theirs[key], held.get(key)):
                    yield (
                        f"{path}: {key} is {held.get(key, 'gone')} as saved, the program was made "
                        f"with {ours[key]}"
                    )


def _comparable(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    keys = [key for key in ours if key in theirs]
    # Where a scheduler has the former, it makes the latter of it.
    return [key for key in keys if key != "lr" or "initial_lr" not in keys]


def _groups(part: torch.optim.Optimizer | LRScheduler) -> list[dict[str, Any]]:
    return part.param_groups if isinstance(part, torch.optim.Optimizer) else [part.state_dict()]


def _options(group: Mapping[str, Any]) -> dict[str, str]:
    options = {k: v for k, v in group.items() if k not in NOT_OPTIONS and not k.startswith("_")}
    texts = {key: _text(value) for key, value in options.items()}
    # The same few texts in all groups: interned they are pickled once.
    return {sys.intern(k): sys.intern(text) for k, text in texts.items() if text is not None}


def _text(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        # A float32 has seven digits that count.
        return f"{value.item():.7g}" if value.dim() == 0 else None
    if isinstance(value, float):
        return f"{value:.12g}"
    if value is None or isinstance(value, (bool, int, str)):
        return str(value)
    if isinstance(value, (list, tuple)):
        texts = [_text(v) for v in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    return None
