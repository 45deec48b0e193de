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
from helpers.problems import batchnorm_dropout, digits, mlp, seeded

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
@pytest.mark.parametrize("own_loss", [False, True], ids=["model's loss", "own loss"])
def test_transformers(name, accumulate, own_loss, tmp_path):
    """A loss of the user's own divides by the items of the step: on held-out batches, it got None for them."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from steppe.integrations.transformers import SharpnessAwareTrainer

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(batchnorm_dropout, dtype=torch.float32)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

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
        compute_loss_func=loss_of if own_loss else None,
    )
    trainer.train()
    assert_same(model.net, expected_net(name, accumulate))


# Held out in turns: 12 of 96 examples, others from epochs 0, 1, 3 on. An epoch has 6 steps, 3 if two are accumulated.

EPOCHS, HELD_OUT = 4, 12
IN_TURNS = steppe.GapSAM(period=1, least=0.05)


def expected_in_turns(accumulate: int, seed: int = 0) -> nn.Module:
    net = seeded(mlp, dtype=torch.float32)
    method = steppe.GapSAM(period=1, least=0.05, epoch_steps=6 // accumulate)
    optimizer = steppe.SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1), method, model=net)
    train, held = steppe.hold_out(TensorDataset(X[:96], Y[:96]), HELD_OUT, seed, in_turns=True)
    for epoch in range(EPOCHS):
        held.set_epoch(epoch)
        (second,) = DataLoader(held, HELD_OUT)
        windows = windows_of(list(DataLoader(train, 16)), accumulate)
        plain_loop(optimizer, windows, lambda b: F.cross_entropy(net(b[0]), b[1]) / accumulate, held_out=second)
    return net


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")  # Lightning's, on torch 2.13
def test_lightning_in_turns(accumulate):
    lightning = pytest.importorskip("lightning")
    from steppe.integrations.lightning import SharpnessAwareCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(mlp, dtype=torch.float32)

        def training_step(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    train, held = steppe.hold_out(TensorDataset(X[:96], Y[:96]), HELD_OUT, in_turns=True)
    callback = SharpnessAwareCallback(steppe.Late(IN_TURNS, start=0.1), auxiliary=DataLoader(held, HELD_OUT))
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", callbacks=[callback], accumulate_grad_batches=accumulate, **quiet
    )
    trainer.fit(Net(), DataLoader(train, 16))
    late = vars(callback.optimizer.method)
    assert (late["start"], late["method"].epoch_steps) == (round(0.1 * EPOCHS * 6 / accumulate), 6 // accumulate)

    callback = SharpnessAwareCallback(IN_TURNS, auxiliary=DataLoader(held, HELD_OUT))
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", callbacks=[callback], accumulate_grad_batches=accumulate, **quiet
    )
    held.set_epoch(0)
    module = Net()
    trainer.fit(module, DataLoader(train, 16))
    assert_same(module.net, expected_in_turns(accumulate))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_transformers_splits_off_a_share(accumulate, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from steppe.integrations.transformers import SharpnessAwareTrainer

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(mlp, dtype=torch.float32)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(x), labels)}

    def trainer_with(auxiliary: float, method: steppe.Method = IN_TURNS, **more: Any) -> Any:
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, max_grad_norm=0.0, data_seed=5,
            per_device_train_batch_size=16, gradient_accumulation_steps=accumulate, num_train_epochs=EPOCHS,
            lr_scheduler_type="constant", train_sampling_strategy="sequential", dataloader_pin_memory=False,
            save_strategy="epoch", **more,
        )  # fmt: skip
        model = Classifier()
        data = [{"x": x, "labels": y, "unused": 0} for x, y in zip(X[:96], Y[:96], strict=True)]
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return SharpnessAwareTrainer(
            model, args, train_dataset=data, method=method, auxiliary=auxiliary, optimizers=(sgd, None)
        )

    for share in (HELD_OUT, HELD_OUT / 96):
        trainer = trainer_with(share)
        trainer.train()
        assert_same(trainer.model.net, expected_in_turns(accumulate, seed=5), tolerance=1e-6)
    steps = 2 * 6 // accumulate  # resumed where the second epoch ends, and the turn of that epoch goes on
    resumed = trainer_with(HELD_OUT)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps}"))
    assert_same(resumed.model.net, trainer.model.net, tolerance=1e-6)  # the order of the held-out batch is another

    late = trainer_with(HELD_OUT, steppe.Late(IN_TURNS, start=0.5), max_steps=8)
    late.train()
    (optimizer,) = {o.optimizer if hasattr(o, "optimizer") else o for o in [late.optimizer]}
    assert (optimizer.method.start, optimizer.method.method.epoch_steps) == (4, 6 // accumulate)
    with pytest.raises(ValueError, match="hold out a number of examples from 1 to 95"):
        trainer_with(96)


def test_turns_need_the_length_of_an_epoch():
    from steppe.integrations.micro_batches import Replay

    _, held = steppe.hold_out(TensorDataset(X[:96], Y[:96]), HELD_OUT, in_turns=True)
    net = seeded(mlp, dtype=torch.float32)
    optimizer = steppe.SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1), IN_TURNS, model=net)
    with pytest.raises(RuntimeError, match=r"how many optimizer steps an epoch has, with GapSAM\(epoch_steps="):
        Replay(DataLoader(held)).begin(optimizer, lambda last: None, None, lambda batch: lambda last: None)


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
