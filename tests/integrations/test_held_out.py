"""Trainers whose second batch is held out of training: the plain loop with the same second batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe
from helpers.plain_loop import assert_same, plain_loop, windows_of
from helpers.problems import batchnorm_dropout, digits, seeded

METHODS = {
    "GapSAM": steppe.GapSAM(period=2, least=0.05),
    "GAM": steppe.GAM(T=1, reference="weights", discrepancy="cosine", directions="unit", period=2),
}
X, Y = digits(torch.float32)
HELD = (X[200:216], Y[200:216])
each = pytest.mark.parametrize(("name", "accumulate"), [("GapSAM", 1), ("GapSAM", 3), ("GAM", 3)])


def expected_net(name: str, accumulate: int) -> nn.Module:
    net = seeded(batchnorm_dropout, dtype=torch.float32)
    optimizer = steppe.SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1), METHODS[name], model=net)
    torch.manual_seed(1)
    windows = windows_of(list(zip(X[:96].split(16), Y[:96].split(16), strict=True)), accumulate)
    plain_loop(optimizer, windows, lambda batch: F.cross_entropy(net(batch[0]), batch[1]) / accumulate, held_out=HELD)
    return net


@each
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")  # Lightning's, on torch 2.13
def test_lightning(name, accumulate):
    lightning = pytest.importorskip("lightning")
    from steppe.integrations.lightning import SharpnessAwareCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(batchnorm_dropout, dtype=torch.float32)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                torch.manual_seed(1)

        def training_step(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    callback = SharpnessAwareCallback(METHODS[name], auxiliary=HELD)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[callback], accumulate_grad_batches=accumulate, **quiet
    )
    module = Net()
    loader = DataLoader(TensorDataset(X[:96], Y[:96]), batch_size=16)
    trainer.fit(module, loader)
    assert_same(module.net, expected_net(name, accumulate))


@each
def test_accelerate(name, accumulate):
    accelerate = pytest.importorskip("accelerate")
    from steppe.integrations.accelerate import Backward

    net = seeded(batchnorm_dropout, dtype=torch.float32)
    optimizer = steppe.SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1), METHODS[name], model=net)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, prepared = accelerator.prepare(net, optimizer)
    backward = Backward(accelerator, model, prepared, auxiliary=DataLoader(TensorDataset(*HELD), 16))
    torch.manual_seed(1)
    for x, y in zip(X[:96].split(16), Y[:96].split(16), strict=True):
        with accelerator.accumulate(model):
            backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            prepared.step()
            prepared.zero_grad()
    assert_same(net, expected_net(name, accumulate))
    assert optimizer.steps == 6 // accumulate


@each
def test_transformers(name, accumulate, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from steppe.integrations.transformers import SharpnessAwareTrainer

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(batchnorm_dropout, dtype=torch.float32)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(x), labels)}

    class Begin(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                torch.manual_seed(1)

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, per_device_train_batch_size=16,
        gradient_accumulation_steps=accumulate, num_train_epochs=1, max_grad_norm=0.0, save_strategy="no",
        lr_scheduler_type="constant", train_sampling_strategy="sequential", dataloader_pin_memory=False,
    )  # fmt: skip
    model = Classifier()
    trainer = SharpnessAwareTrainer(
        model,
        args,
        train_dataset=[{"x": x, "labels": y} for x, y in zip(X[:96], Y[:96], strict=True)],
        method=METHODS[name],
        auxiliary={"x": HELD[0], "labels": HELD[1]},
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        callbacks=[Begin()],
    )
    trainer.train()
    assert_same(model.net, expected_net(name, accumulate))


def test_a_trainer_that_cannot_says_so():
    from steppe.integrations.micro_batches import Replay

    net = seeded(batchnorm_dropout, dtype=torch.float32)
    optimizer = steppe.SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1), METHODS["GAM"], model=net)
    with pytest.raises(RuntimeError, match="supports no held-out batch"):
        Replay(HELD).begin(optimizer, lambda last: None)


def test_a_method_that_needs_held_out_examples_is_refused_without():
    """With the batch of the step before, which was trained on, GapSAM would see no gap and do nothing."""
    from steppe.integrations.micro_batches import Replay

    net = seeded(batchnorm_dropout, dtype=torch.float32)
    base = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = steppe.SharpnessAware(base, steppe.Every(2, steppe.GapSAM()), model=net)
    with pytest.raises(RuntimeError, match="needs examples that are not trained on: train, held = steppe"):
        Replay("previous").begin(optimizer, lambda last: None)
