"""transformers: a tiny language model learns this project's licence, with AdamW, and with SAM around AdamW.

    python examples/transformers_tiny.py

It predicts characters, and trains on a CPU in well under a minute; nothing is downloaded. Lines differ in length, so
the Trainer weights micro-batches by their number of tokens. This holds in every look (gradient evaluation) too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

import steppe
from steppe.integrations.transformers import SharpnessAwareTrainer

METHODS = {"AdamW": steppe.Plain(), "SAM": steppe.SAM(rho=0.1), "LookSAM": steppe.LookSAM(rho=0.1, k=5)}
LENGTH = 64


def lines() -> list[dict[str, Tensor]]:
    text = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="ascii")
    examples = []
    for line in (line.strip() for line in text.splitlines()):
        if len(line) < 20:
            continue
        codes = torch.tensor([ord(character) for character in line[:LENGTH]])
        ids, labels = torch.zeros(LENGTH, dtype=torch.long), torch.full((LENGTH,), -100)
        ids[: len(codes)] = labels[: len(codes)] = codes
        examples.append({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels})
    return examples


def model() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny: more threads are slower
    data = lines()
    train, held_out = [e for i, e in enumerate(data) if i % 5], data[::5]
    print(f"{len(train)} lines for training, {len(held_out)} held out")
    transformers.utils.logging.set_verbosity_error()
    table = Table("method", "loss on held-out lines", "train loss (last epoch)", "steps", "seconds")
    for name, method in METHODS.items():
        print(f"training with {name} ...", flush=True)
        transformers.set_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder, num_train_epochs=args.epochs, per_device_train_batch_size=8, learning_rate=3e-3,
                gradient_accumulation_steps=2, max_grad_norm=1.0, logging_strategy="epoch", save_strategy="no",
                report_to="none", disable_tqdm=True, dataloader_pin_memory=False, use_cpu=True, log_level="error",
            )  # fmt: skip
            trainer = SharpnessAwareTrainer(
                model(), arguments, train_dataset=train, eval_dataset=held_out, method=method
            )
            trainer.remove_callback(transformers.PrinterCallback)
            started = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - started
            loss = trainer.evaluate()["eval_loss"]
        last = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
        table.add_row(name, f"{loss:.3f}", f"{last:.3f}", str(trainer.state.global_step), f"{seconds:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
