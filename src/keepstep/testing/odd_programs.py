"""Odd programs: healthy trainings that look wrong to a naive eye, `python -m
keepstep.testing.odd_programs NAME STEPS RESULTS`.

Goes out, in the directory RESULTS: one file a rank with the digest of its state in the end. Nothing
is planted here: whoever calls one of these wrong, takes a step of it back, or leaves out a batch is
mistaken. Each has something that is not finite, zero, or far beyond all before, and means it.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import keepstep
from keepstep.testing.job import digest

WIDTH, BATCH = 8, 16


@dataclass(frozen=True)
class OddProgram:
    """`protected`: for `protect`, by name. `body`: of one step; what it reports as its loss."""

    protected: dict[str, Any]
    body: Callable[[int], Any]


def network(out: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, out))


def rows(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(BATCH, WIDTH)


def shared(parameters: Sequence[nn.Parameter]) -> None:
    """Make gradients the ranks' mean."""
    having = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
    distributed = torch.distributed
    if not having or not distributed.is_initialized():
        return
    flat = torch.cat([gradient.flatten() for gradient in having])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for gradient, part in zip(having, flat.split([g.numel() for g in having]), strict=True):
        gradient.copy_(part.view_as(gradient))


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[int], torch.Tensor]
) -> OddProgram:
    """The usual body around that loss."""
    parameters = list(model.parameters())

    def body(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(step)
        if found.requires_grad:
            found.backward()
        shared(parameters)
        optimizer.step()
        return found.detach()

    return OddProgram({"model": model, "optimizer": optimizer}, body)


def adam(model: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), rate)


def sgd(model: nn.Module, rate: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate, momentum=0.9)


# -- losses with a floor


def hinge() -> OddProgram:
    """Most batches meet it: their gradient is zero."""
    model = network()

    def loss(step: int) -> torch.Tensor:
        x = rows()
        label = torch.where(x[:, 0] > 0, 1.0, -1.0)
        x[:, 0] += 3 * label
        if step % 97 == 96:
            label[0] *= -1  # an outlier
        return (1 - label * model(x)[:, 0]).clamp(min=0).mean()

    return trained(model, sgd(model, 0.1), loss)


def sparse_rewards() -> OddProgram:
    """A policy that is rewarded once in some hundred steps; else there is no gradient at all."""
    model = network(4)

    def loss(step: int) -> torch.Tensor:
        reward = 50.0 if step % 97 == 96 else 0.0
        return -reward * F.log_softmax(model(rows()), -1)[:, 0].mean()

    return trained(model, adam(model), loss)


def rare_rewards_above_a_bonus() -> OddProgram:
    """Likewise, with a bonus for entropy whose gradient is tiny, and never zero."""
    model = network(4)

    def loss(step: int) -> torch.Tensor:
        log_p = F.log_softmax(model(rows()), -1)
        reward = 5.0 if step % 199 == 198 else 0.0
        return -reward * log_p[:, 0].mean() + 1e-6 * (log_p.exp() * log_p).sum(-1).mean()

    return trained(model, adam(model), loss)


def triplets() -> OddProgram:
    """A margin that soon all keep, until new ones come."""
    model = network(WIDTH)

    def loss(step: int) -> torch.Tensor:
        anchor = rows()
        far = -anchor if step % 151 else anchor + 0.01
        here, near, there = model(anchor), model(anchor + 0.01 * rows()), model(far)
        return F.triplet_margin_loss(here, near, there, margin=0.2)

    return trained(model, sgd(model), loss)


# -- several updates, or none, in a step


def adversaries() -> OddProgram:
    """A generator and a critic of very different gradients; the generator learns at every fifth
    step."""
    maker, critic = network(WIDTH), network()
    both = [torch.optim.Adam(maker.parameters(), 1e-4), torch.optim.Adam(critic.parameters(), 1e-3)]

    def body(step: int) -> torch.Tensor:
        for optimizer in both:
            optimizer.zero_grad()
        fake = maker(rows())
        if step % 5 == 4:
            loss = -1000 * critic(fake).mean()
            loss.backward()
            shared(list(maker.parameters()))
            both[0].step()
        else:
            loss = critic(fake.detach()).mean() - critic(rows()).mean()
            (1e-3 * loss).backward()
            shared(list(critic.parameters()))
            both[1].step()
        return loss.detach()

    protected = {"maker": maker, "critic": critic, "m": both[0], "c": both[1]}
    return OddProgram(protected, body)


def accumulation() -> OddProgram:
    """An update at every fourth step."""
    model = network()
    optimizer = adam(model)

    def body(step: int) -> torch.Tensor:
        x = rows()
        loss = (model(x)[:, 0] - x.sum(1)).square().mean()
        (loss / 4).backward()
        if step % 4 == 3:
            shared(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    # What has been summed up is part of the state between the updates.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return OddProgram({"model": model, "optimizer": optimizer, "gradients": gradients}, body)


def local_updates() -> OddProgram:
    """Each rank by itself; parameters are averaged at every 16th step."""
    model = network()
    optimizer = sgd(model)

    def body(step: int) -> torch.Tensor:
        x = rows()
        optimizer.zero_grad()
        loss = (model(x)[:, 0] - x.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        if step % 16 == 15 and torch.distributed.is_initialized():
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.data)
                parameter.data /= torch.distributed.get_world_size()
        return loss.detach()

    return OddProgram({"model": model, "optimizer": optimizer}, body)


def quasi_newton() -> OddProgram:
    """An update that computes its gradients itself."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))

    def body(step: int) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x)[:, 0] - x.sum(1)).square().mean()
            loss.backward()
            shared(list(model.parameters()))
            return loss

        return torch.as_tensor(optimizer.step(closure)).detach()

    return OddProgram({"model": model, "optimizer": optimizer}, body)


# -- what is not finite, and is meant


def masked_labels() -> OddProgram:
    """Now and then a batch has no label: its mean is 0 / 0, and its gradient zero."""
    model = network(4)

    def loss(step: int) -> torch.Tensor:
        x = rows()
        label = x[:, :4].argmax(1)
        if step % 13 == 0:
            label = torch.full_like(label, -100)
        return F.cross_entropy(model(x), label)

    return trained(model, adam(model), loss)


def missing_values() -> OddProgram:
    """NaN in the data says that there is none."""
    model = network()

    def loss(step: int) -> torch.Tensor:
        x = rows()
        x[torch.rand_like(x) < 0.1] = math.nan
        known = torch.nan_to_num(x)
        return (model(known)[:, 0] - known.sum(1)).square().mean()

    return trained(model, adam(model), loss)


class Gated(nn.Module):
    """Each unit has a gate; one at minus infinity is closed for good."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.gates = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.outer(torch.tanh(self.inner(x)) * torch.sigmoid(self.gates))
        return found


def late_masks() -> OddProgram:
    """Gates are closed one after the other, long after the first step."""
    model = Gated()

    def loss(step: int) -> torch.Tensor:
        if step % 101 == 100 and step // 101 < WIDTH - 1:
            with torch.no_grad():
                model.gates[step // 101] = -math.inf
        x = rows()
        return (model(x)[:, 0] - x.sum(1)).square().mean()

    return trained(model, adam(model), loss)


def causal_scores() -> OddProgram:
    """Attention whose scores are minus infinity above the diagonal, made anew in each step."""
    model = nn.ModuleDict({"key": nn.Linear(WIDTH, WIDTH), "value": nn.Linear(WIDTH, WIDTH)})

    def loss(step: int) -> torch.Tensor:
        x = rows().view(2, -1, WIDTH)
        key = model["key"](x)
        hidden = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)
        weights = torch.softmax(key @ key.transpose(1, 2) + hidden, -1)
        return (weights @ model["value"](x) - x).square().mean()

    return trained(model, adam(model), loss)


def scaled() -> OddProgram:
    """A scaler that grows until gradients overflow, and skips those."""
    model = network()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=20)

    def body(step: int) -> torch.Tensor:
        x = rows()
        optimizer.zero_grad()
        loss = (model(x)[:, 0] - x.sum(1)).square().mean()
        scaler.scale(loss).backward()
        shared(list(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return OddProgram({"model": model, "optimizer": optimizer, "scaler": scaler}, body)


def scaled_by_hand() -> OddProgram:
    """The same in the program's own words: an update is made where all is finite."""
    model = network()
    optimizer = adam(model)
    scale = torch.tensor(2.0**100)

    def body(step: int) -> torch.Tensor:
        x = rows()
        optimizer.zero_grad()
        loss = (model(x)[:, 0] - x.sum(1)).square().mean()
        (loss * scale).backward()
        shared(list(model.parameters()))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient /= scale
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            optimizer.step()
            if step % 20 == 0:
                scale.mul_(4)
        else:
            scale.div_(2)
        return loss.detach()

    return OddProgram({"model": model, "optimizer": optimizer, "scale": scale}, body)


# -- what is far beyond all before, and is meant


def rate_jumps() -> OddProgram:
    """A warm-up, restarts, and jumps by 100."""
    model = network()
    optimizer = sgd(model)

    def loss(step: int) -> torch.Tensor:
        rate = 1e-2 * min(1.0, (step % 200 + 1) / 50) * (0.01 if step // 100 % 2 else 1.0)
        optimizer.param_groups[0]["lr"] = rate
        x = rows()
        return (model(x)[:, 0] - x.sum(1)).square().mean()

    return trained(model, optimizer, loss)


def curriculum() -> OddProgram:
    """Data that are known by heart, and then others that are thirty times as great."""
    model = network()

    def loss(step: int) -> torch.Tensor:
        stage = step // 200
        torch.manual_seed(stage % 3 if stage % 2 == 0 else step)
        x = rows(1.0 if stage % 2 == 0 else 30.0)
        return (model(x)[:, 0] - x.sum(1)).square().mean()

    return trained(model, adam(model, 1e-2), loss)


def frozen_parts() -> OddProgram:
    """Layers learn in turns; at times none does."""
    model = network()

    def loss(step: int) -> torch.Tensor:
        turn = step // 50 % 3
        model[0].requires_grad_(turn == 0)
        model[2].requires_grad_(turn != 2)
        x = rows()
        return (model(x)[:, 0] - x.sum(1)).square().mean()

    return trained(model, adam(model), loss)


def clipped() -> OddProgram:
    """Heavy tails: now and then a gradient is clipped by a factor of a million."""
    model = network()
    optimizer = adam(model)

    def body(step: int) -> torch.Tensor:
        x = rows(1000.0 if step % 89 == 88 else 1.0)
        optimizer.zero_grad()
        loss = (model(x)[:, 0] - x.sum(1)).square().mean()
        loss.backward()
        shared(list(model.parameters()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return OddProgram({"model": model, "optimizer": optimizer}, body)


def sums_of_lengths() -> OddProgram:
    """Losses are summed over sequences of 1 to 2000 items."""
    model = network()

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(1 + step * step % 2000, WIDTH)
        return (model(x)[:, 0] - x.sum(1)).square().sum()

    return trained(model, adam(model), loss)


def sparse_gradients() -> OddProgram:
    """An embedding of which each batch uses few rows."""
    model = nn.Embedding(1000, WIDTH, sparse=True)

    def loss(step: int) -> torch.Tensor:
        return model(torch.arange(step % 900, step % 900 + 4)).square().mean()

    return trained(model, torch.optim.SparseAdam(model.parameters(), 1e-2), loss)


def reset_layers() -> OddProgram:
    """The last layer is drawn anew now and then, ten times as great."""
    model = network()

    def loss(step: int) -> torch.Tensor:
        if step % 199 == 198:
            with torch.no_grad():
                last = model[2]
                assert isinstance(last, nn.Linear)
                last.weight.normal_(0, 10.0)
        x = rows()
        return (model(x)[:, 0] - x.sum(1)).square().mean()

    return trained(model, adam(model, 1e-2), loss)


PROGRAMS: dict[str, Callable[[], OddProgram]] = {
    make.__name__: make
    for make in (
        hinge,
        sparse_rewards,
        rare_rewards_above_a_bonus,
        triplets,
        adversaries,
        accumulation,
        local_updates,
        quasi_newton,
        masked_labels,
        missing_values,
        late_masks,
        causal_scores,
        scaled,
        scaled_by_hand,
        rate_jumps,
        curriculum,
        frozen_parts,
        clipped,
        sums_of_lengths,
        sparse_gradients,
        reset_layers,
    )
}


def train(name: str, steps: int) -> str:
    """Run to the end and return this rank's digest."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.manual_seed(7)
    if world > 1:
        keepstep.init_process_group()
    program = PROGRAMS[name]()
    torch.manual_seed(7 + rank)
    job = keepstep.protect(**program.protected)
    job.places_own_data()
    for step in job.steps(steps):
        with step:
            job.report(loss=program.body(int(step)))
    return digest([torch.get_rng_state(), *(_state(part) for part in program.protected.values())])


def _state(part: Any) -> Any:
    return part.state_dict() if hasattr(part, "state_dict") else part


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m keepstep.testing.odd_programs")
    parser.add_argument("name", choices=sorted(PROGRAMS))
    parser.add_argument("steps", type=int)
    parser.add_argument("results", type=Path)
    args = parser.parse_args()
    found = train(args.name, args.steps)
    (args.results / f"rank-{os.environ.get('RANK', '0')}").write_text(found)


if __name__ == "__main__":
    main()
