"""What the tests of Lightning and Fabric train, and the same training as a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import steppe
from helpers.plain_loop import METHODS, plain_loop, windows_of
from helpers.problems import batchnorm_dropout, digits

lightning = pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from torchmetrics import Accuracy, CatMetric  # noqa: E402

BATCHES, SIZE = 7, 16


def loader() -> DataLoader:
    x, y = digits(torch.float32)
    return DataLoader(TensorDataset(x[: BATCHES * SIZE], y[: BATCHES * SIZE]), batch_size=SIZE)


class Net(lightning.LightningModule):
    """An ordinary module: nothing in it knows of sharpness."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = batchnorm_dropout()
        self.accuracy = Accuracy("multiclass", num_classes=10)
        self.losses = CatMetric(nan_strategy="ignore")  # after an overflow, the other looks see NaN
        self.calls: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        output = self.net(x)
        loss = F.cross_entropy(output, y)
        self.losses.update(loss.detach())
        self.accuracy(output, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"twice": 2 * loss.detach()})
        return {"loss": loss, "guess": output.detach()}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("zero")

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append("backward")

    def on_after_backward(self) -> None:
        self.calls.append("after")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("step")


def fit(module: Any, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Any:
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    options = {"max_epochs": 1, "accelerator": "cpu", "callbacks": list(callbacks)} | quiet | options
    trainer = lightning.Trainer(**options)
    torch.manual_seed(1)  # dropout
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def by_hand(method: steppe.Method, accumulate: int = 1, epochs: int = 1, **options: Any) -> tuple[Any, list]:
    module = Net()
    optimizer = steppe.SharpnessAware(
        torch.optim.SGD(module.net.parameters(), lr=0.1, momentum=0.9), method, model=module.net
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    batches, losses = loader(), []
    torch.manual_seed(1)
    for _ in range(epochs):
        losses += plain_loop(
            optimizer,
            windows_of(list(batches), accumulate),
            lambda batch: F.cross_entropy(module.net(batch[0]), batch[1]) / accumulate,
            scheduler=scheduler,
            **options,
        )
    return module, losses


class Unmodified(Net):
    """The optimizer wrapped where it is made, for use without the callback."""

    def configure_optimizers(self) -> Any:
        return steppe.SharpnessAware(super().configure_optimizers()["optimizer"], METHODS["SAM"], model=self)


class NoSchedule(Net):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


def sixteen(init_scale: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=init_scale))
