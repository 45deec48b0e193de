"""A method that is linear in the model's outputs, in trainers: as in the plain loop, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe
from helpers.plain_loop import assert_same, plain_loop, windows_of
from helpers.problems import digits, mlp, seeded

METHOD = steppe.FunctionalSAM(rho=0.5)
X, Y = digits(torch.float32)
BATCHES = list(zip(X[:96].split(16), Y[:96].split(16), strict=True))
accumulating = pytest.mark.parametrize("accumulate", [1, 3])


def expected_net(accumulate: int) -> nn.Module:
    net = seeded(mlp, dtype=torch.float32)
    optimizer = steppe.SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1), METHOD, model=net)
    windows = windows_of(BATCHES, accumulate)
    plain_loop(optimizer, windows, lambda batch: F.cross_entropy(net(batch[0]), batch[1]) / accumulate)
    return net


@accumulating
def test_accelerate(accumulate):
    accelerate = pytest.importorskip("accelerate")
    from steppe.integrations.accelerate import Backward

    net = seeded(mlp, dtype=torch.float32)
    optimizer = steppe.SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1), METHOD, model=net)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, prepared = accelerator.prepare(net, optimizer)
    backward = Backward(accelerator, model, prepared)
    for x, y in BATCHES:
        with accelerator.accumulate(model):
            backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            prepared.step()
            prepared.zero_grad()
    assert_same(net, expected_net(accumulate))


def lightning_net(accumulate: int, called_by: str) -> Any:
    lightning = pytest.importorskip("lightning")
    from steppe.integrations.lightning import SharpnessAwareCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(mlp, dtype=torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any) -> Tensor:
            return F.cross_entropy((self if called_by == "self" else self.net)(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[SharpnessAwareCallback(METHOD)],
        accumulate_grad_batches=accumulate,
        **quiet,
    )
    module = Net()
    trainer.fit(module, DataLoader(TensorDataset(X[:96], Y[:96]), batch_size=16))
    return module.net


@accumulating
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")  # Lightning's, on torch 2.13
def test_lightning(accumulate):
    assert_same(lightning_net(accumulate, "self"), expected_net(accumulate))
    with pytest.raises(RuntimeError, match="must be the module that the closure or loop calls"):
        lightning_net(accumulate, "self.net")


@accumulating
def test_transformers(accumulate, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from steppe.integrations.transformers import SharpnessAwareTrainer

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(mlp, dtype=torch.float32)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, per_device_train_batch_size=16,
        gradient_accumulation_steps=accumulate, num_train_epochs=1, max_grad_norm=0.0, save_strategy="no",
        lr_scheduler_type="constant", train_sampling_strategy="sequential", dataloader_pin_memory=False,
    )  # fmt: skip

    def trained(**settings: Any) -> nn.Module:
        model = Classifier()
        trainer = SharpnessAwareTrainer(
            model,
            args,
            train_dataset=[{"x": x, "labels": y} for x, y in zip(X[:96], Y[:96], strict=True)],
            method=METHOD,
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
            **settings,
        )
        trainer.train()
        return model.net

    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = F.cross_entropy(outputs["logits"], labels, reduction="sum")
        return loss / num_items_in_batch

    assert_same(trained(compute_loss_func=loss_of), expected_net(accumulate))
    with pytest.raises(RuntimeError, match="return predictions, not the loss"):
        trained()
