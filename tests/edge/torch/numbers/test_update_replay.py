"""An update that is made again, from a snapshot and the gradients: it comes to the same bits, and
to others where memory or the update was wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from keepstep.core.numbers.updates import BLOCK_ELEMENTS, CALIBRATION, UpdateJudge
from keepstep.edge.os.threads import run_acts
from keepstep.edge.torch.numbers.update_replay import ELEMENTWISE, UpdateReplay
from keepstep.edge.torch.state import Protected
from keepstep.model.replicas import Replicas

Bytes = Callable[[Any], Any]
Room = Any  # conftest's
ALL = 1 << 30


class Training:
    """Steps as a rank's session runs them: a capture at each boundary, hooks around updates."""

    def __init__(
        self, room: Room, kind: type = torch.optim.AdamW, most: int = ALL, **options: Any
    ) -> None:
        torch.manual_seed(1)
        self.room = room
        self.model = nn.Sequential(nn.Linear(70, 90), nn.Tanh(), nn.Linear(90, 3))
        self.optimizer = kind(self.model.parameters(), lr=0.01, **options)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.protected = Protected.of({"model": self.model, "optimizer": self.optimizer}, True)
        self.judge = UpdateJudge()
        self.replay = UpdateReplay(self.protected, 0, 1, self.judge, most)
        self.copy: Any = None
        self.wrongs: list[tuple[str, ...]] = []
        self.is_looking = True
        self.optimizer.register_step_pre_hook(self._before)
        self.optimizer.register_step_post_hook(lambda *_: self.replay.updated(self.optimizer))
        self.in_update: Callable[[], None] = lambda: None
        self.optimizer.register_step_post_hook(lambda *_: None)

    def _before(self, *_: Any) -> None:
        if self.copy is not None:
            run_acts(self.copy.copy_still())
            assert self.copy.fence(self.optimizer)
        self.replay.before_update(self.copy)

    def step(
        self,
        before_update: Callable[[], None] = lambda: None,
        rerun: bool = False,
        behind: Callable[[], None] = lambda: None,
    ) -> None:
        self.replay.begin(is_rerun=rerun) if self.is_looking else self.replay.drop()
        self.optimizer.zero_grad()
        given = torch.randn(8, 70)
        if (mesh := getattr(self.model[0].weight, "device_mesh", None)) is not None:
            given = distribute_tensor(given, mesh, [Replicate()])
        self.model(given).square().mean().backward()
        if self.copy is not None:
            run_acts(self.copy.copy_still())
        before_update()
        self.optimizer.step()
        self.schedule.step()
        behind()
        self.replay.end()
        self.replay.turn += 1
        self.wrongs.append(self.replay.wrong)
        self.replay.accept()
        self.copy = self.room.begin(self.protected.gather())

    def learn(self) -> None:
        """Two steps until the optimizer's state is in a snapshot."""
        for _ in range(CALIBRATION + 2):
            self.step()


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """In memory, as no counter of torch's sees it."""
    at = tensor.data_ptr() + element * tensor.element_size() + bit // 8
    ctypes.c_uint8.from_address(at).value ^= 1 << bit % 8


WAYS: list[tuple[type, dict[str, Any]]] = [
    *((kind, {}) for kind in ELEMENTWISE),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"fused": True, "maximize": True}),
]


@pytest.mark.parametrize(("kind", "options"), WAYS)
@pytest.mark.parametrize("most", [ALL, 4 * BLOCK_ELEMENTS])
def test_an_update_that_is_made_again_comes_to_the_same_bits(
    kind: type, options: dict[str, Any], most: int, room: Room, snapshot_bytes: Bytes
) -> None:
    training = Training(room, kind, most, **options)
    for _ in range(12):
        training.step()
    assert training.judge.is_calibrated and "the same bits" in training.judge.why
    assert not any(training.wrongs) and training.replay.cost.updates >= 10
    other = Training(room, kind, **options)
    other.is_looking = False
    for _ in range(12):
        other.step()
    state = [training.model.state_dict(), training.optimizer.state_dict()]
    assert snapshot_bytes(state) == snapshot_bytes(
        [other.model.state_dict(), other.optimizer.state_dict()]
    ), "making updates again changes the training"


@pytest.mark.parametrize("bit", [0, 7, 15, 22, 27, 31])
@pytest.mark.parametrize("site", ["weight", "exp_avg", "exp_avg_sq"])
def test_memory_that_changes_after_the_snapshot_is_seen_and_named(
    site: str, bit: int, room: Room
) -> None:
    """What the update leaves a trace of, bit for bit."""
    planted, undisturbed = Training(room), Training(room)
    states = []
    for training in (undisturbed, planted):
        training.learn()
        weight = training.model[2].weight
        having = {"weight": weight.detach(), **training.optimizer.state[weight]}
        if training is planted:
            training.step(partial(flip, having[site], 17, bit))
        else:
            training.step()
        states.append({key: value.clone() for key, value in having.items()})
    assert not any(planted.wrongs[:-1] + undisturbed.wrongs)
    leaves_trace = any(not torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert planted.wrongs[-1] == (("model.2.weight",) if leaves_trace else ())
    assert leaves_trace or (site, bit) == ("exp_avg_sq", 0), "it rounds away"


def test_an_update_that_computes_wrong_is_seen(room: Room) -> None:
    training = Training(room)
    training.learn()
    hook = training.optimizer.register_step_post_hook(lambda *_: None)
    # in front of what compares, as if the update had made it so
    hooks = training.optimizer._optimizer_step_post_hooks
    bias = training.model[0].bias
    hooks[hook.id] = lambda *_: flip(bias.detach(), 3, 1)
    hooks.move_to_end(hook.id, last=False)
    training.step()
    assert training.wrongs[-1] == ("model.0.bias",)


def test_what_goes_wrong_as_it_is_made_again_is_no_wrong_update(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keepstep.edge.torch.numbers import update_replay

    training, runs = Training(room), []
    training.learn()
    right = update_replay._again

    def wrong_once(*given: Any) -> Any:
        made = right(*given)
        runs.append(made)
        if len(runs) == 1:
            flip(made[0][""], 0, 3)
        return made

    monkeypatch.setattr(update_replay, "_again", wrong_once)
    training.replay.begin(is_rerun=False)
    training.optimizer.step()
    assert training.replay.erred == ("model.0.weight",) and not training.replay.wrong
    assert len(runs) > 1


def test_a_step_that_is_run_again_is_made_again_from_what_was_loaded(room: Room) -> None:
    """Nothing was copied before it: all begin from a snapshot."""
    training = Training(room)
    training.learn()
    training.copy = None
    training.step(rerun=True)
    assert training.replay.cost.updates == CALIBRATION + 2 and not training.wrongs[-1]
    training.copy = None
    training.step(lambda: flip(training.model[0].weight.detach(), 5, 9), rerun=True)
    assert training.wrongs[-1] == ("model.0.weight",)


def test_what_differs_and_counts_all_the_same_is_looked_at_no_more(room: Room) -> None:
    training = Training(room)
    training.learn()
    training.step(lambda: flip(training.model[0].weight.detach(), 5, 9))
    assert training.judge.is_off and "each time" in training.judge.why


def test_a_program_that_writes_parameters_between_is_let_alone(room: Room) -> None:
    """Torch's counters see it: the copy is torn, and says nothing."""
    training = Training(room)
    training.learn()

    def clamp() -> None:
        with torch.no_grad():
            training.model[0].weight.clamp_(-0.01, 0.01)

    before = training.replay.cost.updates
    training.step(clamp)
    assert not training.wrongs[-1] and training.replay.cost.updates == before


def test_only_so_much_is_made_again_and_all_comes_in_turn(room: Room) -> None:
    training = Training(room, most=4 * BLOCK_ELEMENTS)
    training.learn()
    cost = training.replay.cost
    assert cost.nbytes <= cost.updates * 4 * BLOCK_ELEMENTS
    assert cost.alone_bytes == sum(p.nbytes for p in training.model.parameters())
    weight = training.model[0].weight
    for _ in range(5):  # blocks: two of a weight, three of others
        training.step(lambda: flip(weight.detach(), 5, 9))
        if training.wrongs[-1]:
            break
    assert training.wrongs[-1] == ("model.0.weight",)


def test_an_optimizer_of_another_making_is_left_alone(room: Room) -> None:
    class Own(torch.optim.SGD):
        pass

    training = Training(room, Own)
    training.learn()
    assert training.replay.cost.updates == 0 and not training.judge.is_calibrated


@pytest.fixture
def alone_in_a_group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", world_size=1, rank=0)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_shards_are_made_again_where_they_are(room: Room, alone_in_a_group: Any) -> None:
    """As FSDP has them: DTensors, of which each rank updates its own part."""
    training = Training(room)
    for layer in (training.model[0], training.model[2]):
        for name, parameter in list(layer.named_parameters()):
            sharded = distribute_tensor(parameter.detach(), alone_in_a_group, [Shard(0)])
            setattr(layer, name, nn.Parameter(sharded))
    training.optimizer.param_groups[0]["params"] = list(training.model.parameters())
    training.learn()
    assert training.judge.is_calibrated and "the same bits" in training.judge.why
    weight = training.model[2].weight.to_local()
    training.step(lambda: flip(weight.detach(), 17, 9))
    assert training.wrongs[-1] == ("model.2.weight",)


def test_what_other_ranks_have_is_left_to_their_digests(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(room)

    def claims(protected: Any, state: Any) -> Replicas:
        everything = tuple(range(len(state.layout.segments)))
        return Replicas((0, 1), 1, everything, (), True, "")

    monkeypatch.setattr(training.replay._replicas, "find", claims)
    training.learn()
    assert training.replay.cost.updates == 0


@pytest.mark.parametrize("site", ["weight", "exp_avg"])
def test_memory_that_changes_behind_the_update_is_seen(site: str, room: Room) -> None:
    training = Training(room)
    training.learn()
    weight = training.model[2].weight
    tensor = weight if site == "weight" else training.optimizer.state[weight][site]
    training.step(behind=lambda: flip(tensor.detach(), 17, 0))
    assert training.wrongs[-1] == ("model.2.weight",)


@pytest.mark.parametrize("way", ["counted", "past the counters"])
def test_a_program_that_clips_weights_behind_each_update_is_let_alone(way: str, room: Room) -> None:
    training = Training(room)
    weight = training.model[2].weight

    def clip() -> None:
        with torch.no_grad():
            (weight if way == "counted" else weight.data).clamp_(-0.01, 0.01)

    for _ in range(CALIBRATION + 6):
        training.step(behind=clip)
    assert training.judge.is_calibrated and not any(training.wrongs)
    training.step(lambda: flip(weight.detach(), 17, 20), behind=clip)
    assert training.wrongs[-1] == ("model.2.weight",), "updates are made again all the same"


@pytest.mark.parametrize("fused", [False, True])
def test_one_more_update_in_a_body_is_no_error(fused: bool, room: Room) -> None:
    training = Training(room, torch.optim.SGD, momentum=0.9, fused=fused)
    training.learn()
    training.step(behind=lambda: training.optimizer.step())
    assert training.judge.is_calibrated and not training.wrongs[-1]
