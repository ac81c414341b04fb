"""What is trained and saved: the same model and optimizer for all contenders.

In comes the name of a kind; out come training steps, and steps that write their own number into
every tensor. It knows no contender.

Invariant: after `stamp(n)` every tensor says n, so that a restored state tells which step it is of,
or that it is of none: a torn state, or one of mixed steps, has no stamp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Kind:
    """`layers` blocks of two linear layers, four times as wide in between unless `narrow`."""

    width: int
    layers: int
    batch: int
    narrow: bool = False


KINDS = {
    "tiny": Kind(width=16, layers=2, batch=4),  # for tests
    "small": Kind(width=512, layers=7, batch=224),  # 168 MiB
    "large": Kind(width=1024, layers=11, batch=96),  # 1.03 GiB
    "many": Kind(width=64, layers=400, batch=16, narrow=True),  # 9,600 tensors, 39 MiB
}


class Block(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return y


class Workload:
    """One compute thread, and AdamW, whose moments exist from the beginning: memory that is touched
    for the first time is no contender's doing."""

    def __init__(self, name: str) -> None:
        kind = KINDS[name]
        torch.set_num_threads(1)
        torch.manual_seed(0)
        inner = kind.width if kind.narrow else 4 * kind.width
        self.model = torch.nn.Sequential(*(Block(kind.width, inner) for _ in range(kind.layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._data = torch.randn(kind.batch, kind.width)
        self.train()
        self.optimizer.zero_grad()  # a training begins without any: they are no part of the state

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._data).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.state_dict().values()
        for moments in self.optimizer.state.values():
            yield from (value for value in moments.values() if isinstance(value, torch.Tensor))

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @torch.no_grad()
    def stamp(self, step: int) -> None:
        """Written where an update would write: whoever reads the state while training goes on
        learns from the optimizer that it is about to change. Without gradients it changes
        nothing itself."""
        self.optimizer.zero_grad()
        self.optimizer.step()
        for tensor in self.tensors():
            tensor.fill_(step)

    @torch.no_grad()
    def stamped(self) -> int | None:
        """The step that every tensor agrees on, if there is one."""
        step: float | None = None
        for tensor in self.tensors():
            least, most = (float(value) for value in torch.aminmax(tensor))
            if least != most or step not in (None, least):
                return None
            step = least
        return None if step is None or step != int(step) else int(step)
