"""TRL's GRPOTrainer, protected: it goes on in the midst of the completions that it trains on.

python examples/integrations/trl_grpo.py
keepstep run --nproc-per-node 2 examples/integrations/trl_grpo.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from keepstep.integrations.hf import TrainerProtection

WORDS = ["<pad>", "<end>", *(f"w{i}" for i in range(30))]


class SeldomWords:
    """The reward: for words that have been said seldom so far. What has been said is state of the
    program's own."""

    __name__ = "seldom_words"

    def __init__(self) -> None:
        self.said = [0] * len(WORDS)

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """completion_ids: of each completion its words. Returns a reward for each."""
        rewards = [
            sum(1 / (1 + self.said[word]) for word in completion) / max(len(completion), 1)
            for completion in completion_ids
        ]
        for completion in completion_ids:
            for word in completion:
                self.said[word] += 1
        return rewards

    def state_dict(self) -> dict[str, Any]:
        return {"said": self.said}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.said = state["said"]


class ProtectedGRPOTrainer(TrainerProtection, GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer`, protected."""

    def keepstep_components(self) -> dict[str, Any]:
        return {"reward": reward}


reward = SeldomWords()
torch.manual_seed(0)
words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<end>"))
words.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
first_model = tempfile.mkdtemp()  # the reference model is read from where the model was
tokenizer.save_pretrained(first_model)
LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
).save_pretrained(first_model)
trainer = ProtectedGRPOTrainer(
    model=first_model,
    reward_funcs=reward,
    args=GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=4,  # completions of a prompt
        steps_per_generation=2,  # completions of two updates are generated at once,
        num_iterations=2,  # and each is trained on twice
        max_completion_length=6,
        num_train_epochs=2,
        learning_rate=0.01,
        beta=0.05,
        sync_ref_model=True,  # the reference model follows the model
        ref_model_sync_steps=3,
        disable_dropout=False,
        logging_steps=3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{(7 * i) % 30}" for i in range(8)]}),
    processing_class=tokenizer,
)
trainer.train()
print(f"update {trainer.state.global_step}")
