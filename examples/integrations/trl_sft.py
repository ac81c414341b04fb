"""TRL's SFTTrainer, protected: any Trainer that derives from Hugging Face's is, in this way.

python examples/integrations/trl_sft.py
keepstep run --nproc-per-node 2 examples/integrations/trl_sft.py
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from keepstep.integrations.hf import TrainerProtection

WORDS = ["<pad>", "<end>", *(f"w{i}" for i in range(30))]


class ProtectedSFTTrainer(TrainerProtection, SFTTrainer):  # type: ignore[misc]
    """`SFTTrainer`, protected."""


torch.manual_seed(0)
words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<end>"))
words.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
text = [" ".join(f"w{(i * k + k) % 30}" for k in range(1, 9)) for i in range(48)]
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
        pad_token_id=0,
        eos_token_id=1,
    )
)
trainer = ProtectedSFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=0.01,
        max_length=16,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"text": text}),
    processing_class=tokenizer,
)
trainer.train()
print(f"update {trainer.state.global_step}")
