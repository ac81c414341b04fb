"""Mini-training: a small transformer that is trained for some steps, again and again the same.

It has what trainings have: matrix products, softmax, layer norm, embeddings, a loss, AdamW; fixed
weights and data, one thread, deterministic algorithms. So its losses and its last parameters are
the same bits in every repetition and on every machine of one kind (ByteRobust, SOSP 2025, does the
same with a MiniGPT before a job). A kind is torch's version, the CPU's instructions that torch
uses, or the device's name: other kernels add in another order.
"""

from __future__ import annotations

import hashlib
import struct
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.adamw import adamw

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 128, 32, 64, 4, 2, 8
SEED = 20240719
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class TrainedLosses:
    """`digests`: of the losses and the last parameters, one for each repetition. `step_ns`: of all
    but the first step. `first_difference`: (repetition, step) in which a loss was another one than
    in repetition 0; a step of -1: only the parameters were."""

    digests: tuple[str, ...]
    step_ns: tuple[int, ...]
    last_loss: float
    first_difference: tuple[int, int] | None


class MiniAdamW:
    """`torch.optim.AdamW` as its function: the same bits, and not the class, which imports
    torch._dynamo when it is first made. That takes three times as long as all steps here."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._first = [torch.zeros_like(each) for each in self._parameters]
        self._second = [torch.zeros_like(each) for each in self._parameters]
        self._steps = [torch.tensor(0.0) for _ in self._parameters]

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        assert len(gradients) == len(self._parameters), "each one is part of the loss"
        adamw(
            list(self._parameters),
            gradients,
            self._first,
            self._second,
            [],
            self._steps,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=LEARNING_RATE,
            weight_decay=1e-2,
            eps=1e-8,
            maximize=False,
        )


class MiniBlock(nn.Module):
    """One layer: attention and two linear ones, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.joint = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.joint(self.norms[0](x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        scores = (q @ k.transpose(-1, -2)) / (width // HEADS) ** 0.5
        unseen = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        seen = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        x = x + self.out((seen @ v).transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.narrow(F.gelu(self.wide(self.norms[1](x))))
        return y


class MiniTransformer(nn.Module):
    """Predicts the next of VOCABULARY tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*[MiniBlock() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


def train(steps: int, repetitions: int, device: str = "cpu") -> TrainedLosses:
    """Train from the same start, so often."""
    torch.set_num_threads(1)
    # as `use_deterministic_algorithms(True)`, which imports torch._inductor
    torch.set_deterministic_debug_mode("error")
    runs = [_train_once(steps, torch.device(device)) for _ in range(repetitions)]
    difference = None
    for repetition, (losses, digest, _) in enumerate(runs):
        if digest != runs[0][1] and difference is None:
            pairs = zip(map(_bits, runs[0][0]), map(_bits, losses), strict=True)
            step = next((n for n, (one, other) in enumerate(pairs) if one != other), -1)
            difference = (repetition, step)
    times = [ns for _, _, taken in runs for ns in taken[1:]]
    return TrainedLosses(
        tuple(digest for _, digest, _ in runs), tuple(times), runs[0][0][-1], difference
    )


def kind_of(device: str = "cpu") -> str:
    """Whose losses can be compared with this machine's."""
    if device == "cpu":
        return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}"


def _train_once(steps: int, device: torch.device) -> tuple[list[float], str, list[int]]:
    generator = torch.Generator().manual_seed(SEED)
    model = MiniTransformer()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * parameter.shape[-1] ** -0.5)
            else:
                parameter.fill_(1.0 if "norms" in name and name.endswith("weight") else 0.0)
    model.to(device)
    optimizer = MiniAdamW(model)
    losses, taken = [], []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator).to(device)
        begun_ns = time.perf_counter_ns()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        taken.append(time.perf_counter_ns() - begun_ns)
    digest = hashlib.sha256(b"".join(map(_bits, losses)))
    for parameter in model.parameters():
        digest.update(
            bytes(parameter.detach().cpu().contiguous().view(torch.uint8).flatten().tolist())
        )
    return losses, digest.hexdigest()[:32], taken


def _bits(loss: float) -> bytes:
    """float32 has room in a double: equal bits there are equal bits here, NaN among them."""
    return struct.pack("<d", loss)
