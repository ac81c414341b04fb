"""Other people's loops, killed: each example ends with the bits of a run that nobody disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.script_runs import ScriptRun, killed_and_undisturbed

pytestmark = pytest.mark.timeout(900)

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"


def run(room: Path, name: str, needs: str, ends_with: str, ranks: int, held_step: int) -> ScriptRun:
    pytest.importorskip(needs, reason=f"{needs} is not installed: pip install '.[integrations]'")
    script = (EXAMPLES / f"{name}.py").read_text()
    return killed_and_undisturbed(room, script, ends_with, ranks, held_step)[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("held_step", [3, 13])  # of 12 in an epoch, with one rank
def test_hf_trainer(tmp_path: Path, ranks: int, held_step: int) -> None:
    ends_with = (
        "trainer.model.state_dict(), trainer.optimizer.optimizer.state_dict(), "
        "trainer.lr_scheduler.state_dict(), trainer.state.global_step, trainer.state.epoch, "
        "[{k: v for k, v in e.items() if k in ('loss', 'step', 'grad_norm', 'train_loss')} "
        "for e in trainer.state.log_history]"
    )
    run(tmp_path, "hf_trainer", "transformers", ends_with, ranks, held_step)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("held_step", [3, 13])
def test_lightning(tmp_path: Path, ranks: int, held_step: int) -> None:
    ends_with = (
        "model.state_dict(), trainer.optimizers[0].state_dict(), trainer.global_step, "
        "trainer.lr_scheduler_configs[0].scheduler.state_dict(), trainer.current_epoch, "
        "{k: float(v) for k, v in trainer.callback_metrics.items()}"
    )
    run(tmp_path, "lightning_loop", "lightning", ends_with, ranks, held_step)


@pytest.mark.parametrize(("every_batches", "held_step"), [(5, 3), (5, 5), (6, 3), (4, 12)])
def test_lightning_that_validates_in_mid_epoch(
    tmp_path: Path, every_batches: int, held_step: int
) -> None:
    """Behind the batch of an update, or in the midst of one; right before the kill, or earlier."""
    pytest.importorskip("lightning", reason="it is not installed: pip install '.[integrations]'")
    example = (EXAMPLES / "lightning_loop.py").read_text()
    script = example.replace("max_epochs=3,", f"max_epochs=3, val_check_interval={every_batches},")
    assert script != example
    ends_with = (
        "model.state_dict(), trainer.optimizers[0].state_dict(), trainer.global_step, "
        "trainer.lr_scheduler_configs[0].scheduler.state_dict(), trainer.current_epoch, "
        "{k: float(v) for k, v in trainer.callback_metrics.items()}, "
        "trainer.fit_loop.epoch_loop._batches_that_stepped"
    )
    killed_and_undisturbed(tmp_path, script, ends_with, 1, held_step)


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate(tmp_path: Path, ranks: int) -> None:
    ends_with = (
        "model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), data.epoch, data.batch"
    )
    killed = run(tmp_path, "accelerate_loop", "accelerate", ends_with, ranks, held_step=28)
    if ranks > 1:
        assert killed.events("regrouped"), "the other rank stays in its process"


@pytest.mark.parametrize("ranks", [1, 2])
def test_trl(tmp_path: Path, ranks: int) -> None:
    ends_with = (
        "trainer.model.state_dict(), trainer.optimizer.optimizer.state_dict(), "
        "trainer.state.global_step, "
        "[{k: v for k, v in e.items() if not k.startswith('train_')} "
        "for e in trainer.state.log_history]"
    )
    run(tmp_path, "trl_sft", "trl", ends_with, ranks, held_step=3)


@pytest.mark.parametrize("held_step", [3, 15])  # of 12 in an epoch
def test_trl_with_an_order_of_random_numbers(tmp_path: Path, held_step: int) -> None:
    """A sampler that draws an epoch's order from the process's generator."""
    pytest.importorskip("trl", reason="trl is not installed: pip install '.[integrations]'")
    example = (EXAMPLES / "trl_sft.py").read_text()
    by_length = 'num_train_epochs=2, train_sampling_strategy="group_by_length",'
    script = example.replace("num_train_epochs=2,", by_length)
    assert script != example
    ends_with = "trainer.model.state_dict(), trainer.optimizer.optimizer.state_dict()"
    killed_and_undisturbed(tmp_path, script, ends_with, 1, held_step)


GRPO_ENDS_WITH = (
    "trainer.model.state_dict(), trainer.optimizer.optimizer.state_dict(), "
    "trainer.lr_scheduler.state_dict(), trainer.ref_model.state_dict(), "
    "trainer.state.global_step, trainer.state.epoch, trainer._step, trainer._buffered_inputs, "
    "reward.said, "
    "{name: list(column) for name, column in trainer._logs['rewards'].items()}, "
    "[{k: v for k, v in e.items() if k != 'step_time' and not k.startswith('train_')} "
    "for e in trainer.state.log_history]"
)


@pytest.mark.parametrize(("ranks", "held_step"), [(1, 18), (1, 30), (2, 5), (2, 10)])
def test_trl_that_generates(tmp_path: Path, ranks: int, held_step: int) -> None:
    """In the midst of four updates on the same completions, in the first epoch and the second."""
    run(tmp_path, "trl_grpo", "trl", GRPO_ENDS_WITH, ranks, held_step)


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("GRPO", "RLOO"),
        (
            "num_iterations=2,",
            "num_iterations=2, use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=3.45,",
        ),
    ],
)
def test_another_trainer_that_generates(tmp_path: Path, written: str, instead: str) -> None:
    pytest.importorskip("trl", reason="trl is not installed: pip install '.[integrations]'")
    example = (EXAMPLES / "trl_grpo.py").read_text()
    script = example.replace(written, instead)
    assert script != example
    killed_and_undisturbed(tmp_path, script, GRPO_ENDS_WITH, 1, 18)


@pytest.mark.parametrize("ranks", [1, 2])
def test_components(tmp_path: Path, ranks: int) -> None:
    ends_with = (
        "[part.state_dict() for part in trainer.model_parts], "
        "[optimizer.state_dict() for optimizer in trainer.optimizers], "
        "trainer.lr_schedulers.state_dict(), trainer.ntokens_seen, data.epoch, data.batch"
    )
    killed = run(tmp_path, "components", "torch", ends_with, ranks, held_step=28)
    if ranks > 1:
        assert killed.events("regrouped"), "the other rank stays in its process"


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchtitan(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip(
        "torchtitan", reason="torchtitan is not installed: docs/integrations/torchtitan.md"
    )
    future = "from __future__ import annotations\n"
    on_cpu = Path(__file__).with_name("torchtitan_on_cpu.py").read_text()
    example = (EXAMPLES / "torchtitan_train.py").read_text()
    ends_with = (
        "[part.state_dict() for part in trainer.model_parts], "
        "[optimizer.state_dict() for optimizer in trainer.optimizers], "
        "trainer.lr_schedulers.state_dict(), trainer.state_dict(), "
        "trainer.dataloader.dataset.state_dict()"
    )
    script = example.replace(future, future + on_cpu)
    killed_and_undisturbed(tmp_path, script, ends_with, ranks, held_step=23)
