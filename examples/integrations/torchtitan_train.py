"""torchtitan's Trainer, protected: its smallest Llama 3, sharded by FSDP2 over all ranks.

keepstep run --nproc-per-node 2 examples/integrations/torchtitan_train.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from keepstep.integrations.torchtitan import ProtectedTorchtitanTrainer

WORDS = ["<begin>", "<end>", *(f"w{i}" for i in range(30))]


def make_assets(folder: Path) -> None:
    """A tokenizer, and 64 texts in the shape of C4."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<begin>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    texts = [" ".join(f"w{(i * k + k) % 30}" for k in range(1, 40)) for i in range(64)]
    (folder / "c4_test").mkdir()
    (folder / "c4_test" / "data.json").write_text(
        "\n".join(json.dumps({"text": text}) for text in texts)
    )


folder = Path(tempfile.mkdtemp())
make_assets(folder)
config = llama3_debugmodel()
config.dump_folder = str(folder / "outputs")
config.hf_assets_path = str(folder)
config.dataloader.dataset_path = str(folder / "c4_test")
config.training = TrainingConfig(local_batch_size=2, seq_len=32, steps=30)
config.parallelism.spmd_backend = "partial_dtensor"  # its default needs a newer FSDP than 2.13's
config.lr_scheduler.warmup_steps = 5
config.debug.seed = 0

trainer = ProtectedTorchtitanTrainer(config)
trainer.train()
trainer.close()
print(f"step {trainer.step}, {trainer.ntokens_seen} tokens")
