"""The guard: what it sees of a step, what it withholds, and what it leaves alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from keepstep.core.numbers.spikes import LEAST_STEPS, Spikes
from keepstep.edge.torch.membership import Membership
from keepstep.edge.torch.numbers.guard import Guard
from keepstep.edge.torch.state import Protected
from keepstep.model.numbers import NotFinite, Sign


class Training:
    def __init__(self, world_size: int = 1, withholds: bool = True, compares: bool = True) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.protected = Protected.of({"model": self.model, "optimizer": self.optimizer}, True)
        self.members = Membership()
        self.spikes = Spikes(compares)
        self.guard = Guard(
            self.protected, self.members, world_size, self.spikes, withholds=withholds
        )
        self.optimizer.register_step_pre_hook(self.guard.before_update)

    def step(
        self, plant: str = "", is_watched: bool = False, loss: object = None
    ) -> tuple[Sign, ...]:
        self.guard.begin(is_watched)
        self.optimizer.zero_grad()
        self.model(torch.randn(3, 4)).square().mean().backward()
        if plant == "gradient":
            self.model[2].weight.grad[0, 1] = math.nan  # type: ignore[index]
        if plant == "explosion":
            self.model[2].weight.grad[0, 1] = 1e25  # type: ignore[index]
        if plant == "moment":
            self.optimizer.state[self.model[0].weight]["exp_avg"][0, 0] = math.inf
        self.optimizer.step()
        return self.guard.end(loss)

    def state(self) -> list[torch.Tensor]:
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [t.clone() for t in (*self.model.parameters(), *moments)]


def test_an_update_with_a_bad_gradient_is_withheld_and_named() -> None:
    training = Training()
    assert training.step() == ()
    before = training.state()
    assert training.step("gradient") == (Sign.GRADIENT,)
    assert all(map(torch.equal, before, training.state()))
    assert training.guard.sight((), False).bad_gradients == ("model.2.weight",)
    assert training.step() == ()  # the next one is an update as any


def test_by_default_the_update_is_made_and_what_comes_of_it_is_wrong() -> None:
    training = Training(withholds=False, compares=False)
    assert training.step() == ()
    assert training.step("gradient") == (Sign.GRADIENT,)
    assert not bool(torch.isfinite(training.model[2].weight).all())
    seen = training.guard.sight((), False)
    assert seen.bad_gradients == ("model.2.weight",)
    assert not seen.bad_weights and not seen.bad_moments, "as they were in front of the update"


@pytest.mark.parametrize("plant", [math.nan, math.inf, 1e25])
def test_an_optimizer_that_knows_what_to_do_with_such_gradients_is_left_alone(
    plant: float,
) -> None:
    training = Training(withholds=False, compares=False)
    assert training.step() == ()
    weight, seen = training.model[2].weight, []

    def clean(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.append(float(weight.grad[0, 0]))  # type: ignore[index]
        weight.grad.nan_to_num_(0.0, 1.0, -1.0).clamp_(-1, 1)  # type: ignore[union-attr]

    training.optimizer.register_step_pre_hook(clean)
    handle = weight.register_hook(lambda gradient: gradient * 0 + plant)
    assert training.step() == ()
    handle.remove()
    assert not math.isfinite(seen[0]) or seen[0] == pytest.approx(plant)
    assert all(bool(torch.isfinite(t).all()) for t in training.state())


def test_where_all_is_finite_nothing_is_changed() -> None:
    one, other = Training(), Training()
    other.guard.begin = lambda is_watched: None  # type: ignore[method-assign]
    for _ in range(3):
        torch.manual_seed(4)
        assert one.step() == ()
        torch.manual_seed(4)
        other.step()
    assert all(map(torch.equal, one.state(), other.state()))


def test_what_a_loss_scaler_skips_is_not_seen() -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)  # type: ignore[attr-defined]
    training.guard.begin(False)
    scaler.scale(training.model(torch.randn(3, 4)).square().mean()).backward()
    training.model[0].weight.grad[0, 0] = math.inf
    scaler.step(training.optimizer)
    scaler.update()
    assert training.guard.end(math.nan) == () and scaler.get_scale() == 1.0


def test_what_a_fused_optimizer_is_told_to_skip_is_not_seen() -> None:
    training = Training()
    training.optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    training.optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
    training.guard.begin(False)
    training.model(torch.randn(3, 4)).sum().backward()
    training.guard.before_update(training.optimizer, (), {})
    assert training.guard.end(None) == () and training.guard.norm is None
    training.optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    training.guard.begin(False)
    training.guard.before_update(training.optimizer, (), {})
    training.guard.end(None)
    norm = math.hypot(*(float(p.grad.norm()) for p in training.model.parameters()))  # type: ignore[union-attr]
    assert training.guard.norm == pytest.approx(norm / 8)


def test_a_loss_that_is_not_finite_harms_nothing_where_gradients_are() -> None:
    """torch's mean over no labels at all is NaN, and its gradient zero."""
    training = Training()
    assert training.step(loss=torch.tensor(math.nan)) == ()
    training.guard.begin(False)
    training.optimizer.zero_grad()
    logits = training.model[:1](torch.randn(3, 4))
    loss = nn.functional.cross_entropy(logits, torch.full((3,), -100))
    loss.backward()
    training.optimizer.step()
    assert math.isnan(float(loss)) and training.guard.end(loss) == ()


def test_a_gradient_greater_than_the_model_and_all_before_is_a_sign() -> None:
    training = Training()
    for _ in range(LEAST_STEPS):
        assert training.step(loss=1.0) == ()
        training.guard.accept()
    weight = training.model[2].weight
    for factor, signs in ((1e9, (Sign.EXPLOSION,)), (1.0, ())):
        handle = weight.register_hook(lambda gradient, by=factor: gradient * by)
        assert training.step(loss=1.0) == signs
        handle.remove()


def test_a_product_that_does_not_fit_its_checksum_is_a_sign_and_names_its_layer() -> None:
    training = Training()
    training.guard = Guard(training.protected, training.members, 1, Spikes(), checks_products=True)
    assert training.step() == ()

    def plant(module: nn.Module, args: object, y: torch.Tensor) -> torch.Tensor:
        return y + torch.eye(*y.shape)

    training.model[0].register_forward_hook(plant)
    assert training.step() == (Sign.PRODUCT,)
    sight = training.guard.sight((), False)
    assert sight.origin is not None and sight.origin.layer == "model.0" and sight.is_origin


def test_optimizers_that_take_turns_have_each_their_own_level() -> None:
    training = Training()
    other = nn.Linear(4, 1)
    critic = torch.optim.SGD(other.parameters(), 1e-9)
    critic.register_step_pre_hook(training.guard.before_update)
    for number in range(3 * LEAST_STEPS):
        if number % 3:
            assert training.step() == ()
        else:
            training.guard.begin(False)
            critic.zero_grad()
            (1e7 * other(torch.randn(3, 4)).sum()).backward()
            critic.step()
            assert training.guard.end(None) == ()
        training.guard.accept()


def test_what_is_bad_in_memory_is_named() -> None:
    training = Training()
    training.step()
    training.step("moment")
    sight = training.guard.sight((), False)
    assert "exp_avg of model.0.weight" in sight.bad_moments
    assert sight.bad_weights == ("model.0.weight",)


def test_what_was_bad_from_the_beginning_is_not() -> None:
    training = Training()
    training.model[0].weight.requires_grad_(False)[0, 0] = -math.inf  # a mask, say
    training.step()
    assert training.guard.sight((), False).bad_weights == ()


def test_infinities_in_parameters_may_be_meant_and_are_no_news_then() -> None:
    training = Training()
    training.step()
    with torch.no_grad():
        training.model[0].weight[0, 0] = -math.inf
    assert training.guard.bad_state() == NotFinite(("model.0.weight",), may_be_meant=True)
    training.guard.learn()
    assert not training.guard.bad_state()
    with torch.no_grad():
        training.model[0].weight[0, 1] = math.nan
    assert training.guard.bad_state() == NotFinite(("model.0.weight",))


def test_what_has_spread_is_not_told_of_the_live_state() -> None:
    training = Training()
    training.step()
    training.step("moment")
    sight = training.guard.sight(("model.0.weight",), True)
    assert (sight.bad_moments, sight.bad_weights) == ((), ("model.0.weight",))
    bad = training.guard.bad_state()
    assert bad.names[0] == "exp_avg of model.0.weight" and not bad.may_be_meant


def test_what_a_snapshot_had_is_told_as_moments_or_weights() -> None:
    training = Training()
    training.step()
    sight = training.guard.sight(("optimizer.state.0.exp_avg", "model.2.bias"), True)
    assert sight.bad_moments == ("optimizer.state.0.exp_avg",)
    assert sight.bad_weights == ("model.2.bias",)


def test_what_is_given_to_sums_is_known_before_they_come_back() -> None:
    training = Training(world_size=2)
    training.guard.begin(False)
    training.members.on_give([torch.ones(4)])
    training.members.on_give([torch.tensor([1.0, math.nan]), torch.tensor([7])])
    training.guard.end(None)
    sight = training.guard.sight((), False)
    assert sight.gave_bad_at == 1 and sight.gave is not None and math.isnan(sight.gave)
    training.members.on_give([torch.tensor([math.nan])])  # nobody listens between bodies
    training.guard.begin(False)
    training.guard.end(None)
    assert training.guard.sight((), False).gave is None


def test_a_watched_step_tells_its_own_gradients() -> None:
    training = Training()
    training.step()
    training.step(is_watched=True)
    sight = training.guard.sight((), False)
    assert sight.digest and sight.origin is None
    assert sight.gave == pytest.approx(training.guard.norm)


@pytest.mark.parametrize("withholds", [True, False])
def test_what_an_update_makes_of_a_gradient_too_great_to_square_was_in_no_memory(
    withholds: bool,
) -> None:
    """Else the optimizer's state would be at fault, in which the square is infinite."""
    training = Training(withholds=withholds, compares=False)
    assert training.step() == ()
    assert training.step("explosion") == (Sign.EXPLOSION,)
    moment = training.optimizer.state[training.model[2].weight]["exp_avg_sq"]
    assert bool(torch.isinf(moment).any())
    sight = training.guard.sight((), False)
    assert sight.bad_moments == sight.bad_weights == ()


def test_the_digest_ends_with_the_update_and_a_sum_before_it_makes_it_empty() -> None:
    def digest(give: bool, factor: float) -> str:
        training = Training(world_size=2)
        training.guard.begin(True)
        if give:
            training.members.on_give([torch.ones(4)])
        training.model(torch.randn(3, 4)).square().mean().backward()
        training.members.on_give([torch.ones(4)])
        training.guard.before_update(training.optimizer, (training.optimizer,), {})
        (training.model(torch.randn(3, 4)).square().mean() * factor).backward()
        training.guard.end(None)
        return training.guard.sight((), False).digest

    assert digest(False, 1.0) == digest(False, 2.0) != ""
    assert digest(True, 1.0) == ""


def test_batches_are_told_by_their_places_and_left_out() -> None:
    training = Training()
    rows = torch.arange(12.0).reshape(6, 2)
    rows[3, 1] = math.nan
    data, _ = training.protected.loaders.add(DataLoader(rows, batch_size=2), "text", 1)
    training.guard.begin(False)
    next(data), next(data)
    training.guard.end(None)
    sight = training.guard.sight((), False)
    assert sight.batches == 2
    assert sight.bad_batch == ("batch 1 of epoch 0 of loader 'text'",)
    places = training.guard.places()
    assert [(p.epoch, p.number) for p in places] == [(0, 0), (0, 1)]
    training.guard.skip(places[1:])
    training.guard.begin(False)
    assert training.guard.places() == ()


def test_gradients_that_an_update_makes_by_itself_are_not_looked_at() -> None:
    training = Training()
    training.guard.begin(False)
    training.optimizer.step(lambda: float(training.model(torch.randn(3, 4)).sum()))
    assert training.guard.end(None) == () and training.guard.norm is None
    assert not training.guard.sight((), False).looked
    training.step()
    assert training.guard.sight((), False).looked
