"""Lightning: the same module with its own optimizer, and with one more callback.

    python examples/lightning_digits.py

Trains scikit-learn's digits on a CPU in well under a minute, with bfloat16, two batches a step, gradient clipping and a
learning-rate schedule. Prints what Lightning logged, and how often `training_step` ran.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

import steppe
from steppe.integrations.lightning import SharpnessAwareCallback


class Digits(L.LightningModule):
    """An ordinary module: nothing in it is about sharpness."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
        )
        self.train_accuracy = Accuracy("multiclass", num_classes=10)
        self.test_accuracy = Accuracy("multiclass", num_classes=10)
        self.runs = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss, logs and a metric."""
        self.runs += 1
        x, y = batch
        output = self.net(x)
        loss = F.cross_entropy(output, y)
        self.train_accuracy(output, y)
        self.log("train_loss", loss, on_epoch=True)
        self.log("train_accuracy", self.train_accuracy, on_epoch=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Accuracy."""
        self.test_accuracy(self.net(batch[0]), batch[1])
        self.log("test_accuracy", self.test_accuracy, on_epoch=True)

    def configure_optimizers(self) -> Any:
        """SGD and a schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


CALLBACKS = {
    "SGD": [],
    "SAM": [SharpnessAwareCallback(steppe.SAM(rho=0.1))],  # the one line that changes
    "GSAM": [SharpnessAwareCallback(steppe.GSAM(rho=0.1, alpha=0.2))],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the net is small: more threads are slower
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.5, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in split)
    table = Table("method", "test accuracy", "train loss", "train accuracy", "steps", "runs of training_step")
    for name, callbacks in CALLBACKS.items():
        print(f"training with {name} ...", flush=True)
        L.seed_everything(0, verbose=False)
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=args.epochs, callbacks=callbacks, precision="bf16-mixed",
            accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Digits()
        trainer.fit(module, DataLoader(TensorDataset(x.float(), y), batch_size=32, shuffle=True, drop_last=True))
        logged = trainer.callback_metrics
        row = [f"{logged['train_loss_epoch']:.4f}", f"{logged['train_accuracy_epoch']:.1%}"]
        trainer.test(module, DataLoader(TensorDataset(x_test.float(), y_test), batch_size=500), verbose=False)
        test = f"{trainer.callback_metrics['test_accuracy']:.1%}"
        table.add_row(name, test, *row, str(trainer.global_step), str(module.runs))
    Console().print(table)


if __name__ == "__main__":
    main()
