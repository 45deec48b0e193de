"""Bases with two modes (schedule-free) and several bases at once (Muon and AdamW): trainers equal the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe
from helpers.plain_loop import assert_same
from helpers.problems import digits

accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
schedulefree = pytest.importorskip("schedulefree")
transformers = pytest.importorskip("transformers")

from steppe.integrations.accelerate import Backward  # noqa: E402
from steppe.integrations.fabric import passes  # noqa: E402
from steppe.integrations.lightning import SharpnessAwareCallback  # noqa: E402
from steppe.integrations.transformers import SharpnessAwareTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the trainers' own, about workers and loggers
EPOCHS, SIZE, COUNT = 2, 16, 64
METHODS = [steppe.SAM(rho=0.1), steppe.MSAM()]  # MSAM's first look is away from the weights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        output = self.last(torch.tanh(self.first(x)))
        return output if labels is None else {"loss": F.cross_entropy(output, labels), "logits": output}


def data() -> tuple[Tensor, Tensor]:
    x, y = digits(torch.float32)
    return x[:COUNT], y[:COUNT]


def batches() -> list[tuple[Tensor, Tensor]]:
    x, y = data()
    return list(zip(x.split(SIZE), y.split(SIZE), strict=True))


def schedule_free(net: nn.Module) -> Any:
    return schedulefree.AdamWScheduleFree(net.parameters(), lr=0.01)


def muon_and_adamw(net: nn.Module) -> Any:
    matrices, rest = ([p for p in net.parameters() if (p.dim() == 2) == wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


BASES = [schedule_free, muon_and_adamw]


def wrapped(base: Any, method: steppe.Method, net: nn.Module) -> steppe.SharpnessAware:
    return steppe.SharpnessAware(base(net), method, model=net)


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


class Evaluated:
    """The loss of all data at the weights that the base evaluates at, after each epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def note(self, net: nn.Module, opt: Any) -> None:
        opt.eval()
        with torch.no_grad():
            self.losses.append(loss_of(net, data()).item())
        opt.train()


def by_hand(base: Any, method: steppe.Method) -> tuple[Net, list[float]]:
    net, seen = Net(), Evaluated()
    opt = wrapped(base, method, net)
    opt.train()
    for _ in range(EPOCHS):
        for batch in batches():
            opt.step(lambda batch=batch: loss_of(net, batch))
        seen.note(net, opt)
    return net, seen.losses


def with_transformers(base: Any, method: steppe.Method, folder: Any) -> tuple[Net, list[float]]:
    net = Net()
    opt = wrapped(base, method, net)
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, num_train_epochs=EPOCHS,
        per_device_train_batch_size=SIZE, per_device_eval_batch_size=COUNT, eval_strategy="epoch", save_strategy="no",
        max_grad_norm=0.0, lr_scheduler_type="constant", train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"x": x, "labels": y} for x, y in zip(*data(), strict=True)]
    trainer = SharpnessAwareTrainer(net, args, train_dataset=rows, eval_dataset=rows, optimizers=(opt, None))
    trainer.train()
    opt.train()  # the last that the Trainer did was to evaluate
    return net, [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def with_lightning(base: Any, method: steppe.Method, folder: Any) -> tuple[Net, list[float]]:
    seen = Evaluated()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return wrapped(base, method, self.net)

        def on_train_epoch_start(self) -> None:
            self.optimizers().train()

        def on_train_epoch_end(self) -> None:
            seen.note(self.net, self.optimizers())

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[SharpnessAwareCallback()], default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(*data()), SIZE))
    return module.net, seen.losses


def with_accelerate(base: Any, method: steppe.Method, folder: Any) -> tuple[Net, list[float]]:
    net, seen, accelerator = Net(), Evaluated(), accelerate.Accelerator(cpu=True)
    model, opt, loader = accelerator.prepare(net, wrapped(base, method, net), DataLoader(TensorDataset(*data()), SIZE))
    backward = Backward(accelerator, model, opt)
    opt.train()
    for _ in range(EPOCHS):
        for batch in loader:
            backward(lambda batch: loss_of(model, batch), batch)
            opt.step()
            opt.zero_grad()
        seen.note(net, opt)
    return net, seen.losses


def with_fabric(base: Any, method: steppe.Method, folder: Any) -> tuple[Net, list[float]]:
    net, seen, fabric = Net(), Evaluated(), lightning.Fabric(accelerator="cpu")
    model, opt = fabric.setup(net, wrapped(base, method, net))
    opt.train()
    for _ in range(EPOCHS):
        for batch in batches():
            for _ in passes(fabric, opt):
                fabric.backward(loss_of(model, batch))
            opt.step()
            opt.zero_grad()
        seen.note(net, opt)
    return net, seen.losses


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
@pytest.mark.parametrize(
    "trained", [with_transformers, with_lightning, with_accelerate, with_fabric], ids=lambda f: f.__name__
)
def test_training_and_evaluation_are_the_plain_loop(trained: Any, base: Any, method: steppe.Method, tmp_path):
    net, losses = trained(base, method, tmp_path)
    expected, expected_losses = by_hand(base, method)
    assert_same(net, expected)
    assert losses == pytest.approx(expected_losses, abs=1e-5)


def test_an_interrupted_trainer_leaves_the_weights_where_they_were(tmp_path):
    """Between two micro-batches of a method whose first look is away from the weights."""

    class Interrupt(transformers.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 1:
                raise KeyboardInterrupt

        def on_step_end(self, *_: Any, **__: Any) -> None:
            after.append([p.detach().clone() for p in net.parameters()])

    net, after = Net(), []
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=SIZE, gradient_accumulation_steps=2, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"x": x, "labels": y} for x, y in zip(*data(), strict=True)]
    trainer = SharpnessAwareTrainer(net, args, train_dataset=rows, method=steppe.MSAM(), callbacks=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), after[0], strict=True))
