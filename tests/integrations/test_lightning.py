"""Lightning: with any precision and accumulation a run is the plain loop, and nothing happens twice."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import steppe
from helpers.plain_loop import METHODS, assert_same, plain_loop, windows_of

lightning = pytest.importorskip("lightning")

from integrations.lightning_problem import BATCHES, SIZE, Net, NoSchedule, Unmodified, by_hand, fit, loader, sixteen  # noqa: E402
from steppe.integrations.lightning import SharpnessAwareCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),  # Lightning's, on torch 2.13
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # torch's, when a first step is skipped
]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_is_the_plain_loop(name: str, accumulate: int):
    module = Net()
    fit(module, SharpnessAwareCallback(METHODS[name]), accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    expected, _ = by_hand(METHODS[name], accumulate, clip=0.5)
    assert_same(module.net, expected.net)


@pytest.mark.parametrize("name", ["SAM", "FrobSAM"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**24])  # the second overflows at first: those steps are skipped
def test_half_precision_with_a_scaler_is_the_plain_loop(name: str, accumulate: int, scale: float):
    module, plugin, scaler = Net(), sixteen(scale), torch.amp.GradScaler("cpu", init_scale=scale)
    callback = SharpnessAwareCallback(METHODS[name])
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "max_epochs": 3}
    trainer = fit(module, callback, plugins=[plugin], **options)
    expected, _ = by_hand(METHODS[name], accumulate, 3, clip=0.5, scaler=scaler, autocast=torch.float16)
    assert_same(module.net, expected.net)
    assert plugin.scaler is not None and plugin.scaler.get_scale() == scaler.get_scale()
    skipped = trainer.global_step - callback.optimizer.steps
    assert (skipped > 0) == (scaler.get_scale() < scale) == (scale == 2.0**24)


@pytest.mark.parametrize("method", [steppe.MSAM(), steppe.SAMPa(), steppe.ARWP()], ids=lambda method: method.name)
def test_the_first_look_may_be_away_from_the_weights(method: steppe.Method):
    module = Net()
    fit(module, SharpnessAwareCallback(method), accumulate_grad_batches=2, gradient_clip_val=0.5)
    expected, _ = by_hand(method, 2, clip=0.5)
    assert_same(module.net, expected.net)


class Counting(Net):
    """Counts in its attributes, as many modules do, and lets the loss depend on the count."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.outputs, self.total = 0, [], torch.zeros(())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        assert self.count == batch_idx
        self.count += 1
        result = super().training_step(batch, batch_idx)
        self.outputs.append(result["loss"].detach())
        self.total += result["loss"].detach()
        return result


def test_what_a_module_counts_is_counted_once():
    module, watch = Counting(), Watch()
    fit(module, SharpnessAwareCallback(METHODS["SAM"]), watch)
    assert module.count == len(module.outputs) == BATCHES
    assert watch.losses == [loss.item() for loss in module.outputs]
    assert module.total.item() == pytest.approx(sum(watch.losses), rel=1e-6)


def test_bfloat16_is_the_plain_loop():
    module = Net()
    fit(module, SharpnessAwareCallback(METHODS["CRSAM"]), precision="bf16-mixed", accumulate_grad_batches=3)
    expected, _ = by_hand(METHODS["CRSAM"], 3, autocast=torch.bfloat16)
    assert_same(module.net, expected.net)


class Watch(lightning.Callback):
    """Keeps what Lightning reports."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.logged.append(trainer.callback_metrics["loss_step"].item())
        assert outputs["guess"].shape == (SIZE, 10)


def test_losses_logs_metrics_and_hooks_are_those_of_the_first_look():
    module, watch = Net(), Watch()
    callback = SharpnessAwareCallback(METHODS["CRSAM"])
    trainer = fit(module, callback, watch, accumulate_grad_batches=2)
    _, losses = by_hand(METHODS["CRSAM"], 2)
    assert watch.losses == pytest.approx(losses, abs=1e-6)
    assert watch.logged == pytest.approx([2 * loss for loss in losses], abs=1e-6)
    assert trainer.callback_metrics["loss_epoch"].item() == pytest.approx(2 * sum(losses) / BATCHES, abs=1e-6)
    assert module.losses.compute().tolist() == pytest.approx([2 * loss for loss in losses], abs=1e-6)
    accuracy: Any = module.accuracy
    assert accuracy.update_count == module.losses.update_count == BATCHES
    assert int((accuracy.tp + accuracy.fn).sum()) == BATCHES * SIZE
    step = ["zero", "backward", "after", "backward", "after", "step"]
    assert module.calls == [*step, *step, *step, "zero", "backward", "after", "step"]
    assert callback.optimizer.steps == trainer.global_step == 4
    assert callback.optimizer.metrics["looks"] == 3


class Seed(lightning.Callback):
    """Lightning's checkpoints hold no random state."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(BATCHES * trainer.current_epoch + batch_idx)


@pytest.mark.parametrize("order", [1, -1])
def test_every_look_sees_the_same_masks_whatever_happens_between_two_batches(order: int):
    module, expected = Net(), Net()
    fit(module, *[Seed(), SharpnessAwareCallback(METHODS["CRSAM"])][::order], accumulate_grad_batches=3)
    base = torch.optim.SGD(expected.net.parameters(), lr=0.1, momentum=0.9)
    optimizer = steppe.SharpnessAware(base, METHODS["CRSAM"], model=expected.net)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def loss_of(item: tuple[int, Any]) -> Tensor:
        torch.manual_seed(item[0])
        return F.cross_entropy(expected.net(item[1][0]), item[1][1]) / 3

    plain_loop(optimizer, windows_of(list(enumerate(loader())), 3), loss_of, scheduler=scheduler)
    assert_same(module.net, expected.net)


class Hooked(Net):
    """Sets, before each batch, a buffer, and before each step the learning rate."""

    batch: Tensor
    met: ClassVar[list[int]] = []  # of the class: what looks note in the module is undone

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batch", torch.tensor(0))
        self.met.clear()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch.fill_(1 + batch_idx)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.met.append(int(self.batch))
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.param_groups[0]["lr"] = 1 + batch_idx
        optimizer.step(closure=optimizer_closure)


def test_every_look_comes_after_the_hooks_before_it():
    module, rates = Hooked(), []
    method = steppe.SAM(rho=lambda step, lr: rates.append(lr) or 0.05)
    fit(module, SharpnessAwareCallback(method))
    assert module.met == [1 + i // 2 for i in range(2 * BATCHES)]
    assert rates == [1 + i for i in range(BATCHES)]


def test_resuming_is_not_having_stopped(tmp_path):
    method, path, options = METHODS["LookSAM"], tmp_path / "here.ckpt", {"accumulate_grad_batches": 2}
    whole, first, second = Net(), Net(), Net()
    fit(whole, Seed(), SharpnessAwareCallback(method), max_epochs=3, **options)
    fit(first, Seed(), SharpnessAwareCallback(method), **options).save_checkpoint(path)
    callback = SharpnessAwareCallback(method)
    fit(second, Seed(), callback, max_epochs=3, ckpt_path=path, **options)
    assert callback.optimizer.steps == 12
    assert_same(second.net, whole.net, tolerance=0)


class WrappedAndScheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = steppe.SharpnessAware(super().configure_optimizers()["optimizer"], METHODS["SAM"], model=self)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_without_the_callback_plain_precisions_train_right(precision: str):
    bare, ours = Unmodified(), NoSchedule()
    fit(bare, precision=precision)
    fit(ours, SharpnessAwareCallback(METHODS["SAM"]), precision=precision)
    assert_same(bare.net, ours.net)
    assert bare.accuracy.update_count == 2 * BATCHES  # what the callback is for


@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"plugins": [sixteen(2.0)]}], ids=["accumulation", "16-mixed"]
)
def test_without_the_callback_what_cannot_be_right_is_refused(options: dict):
    with pytest.raises(RuntimeError, match=r"hold gradients that no step has used|needs a direction"):
        fit(Unmodified(), **options)


def test_the_callback_takes_an_optimizer_that_is_wrapped_already():
    wrapped, ours = WrappedAndScheduled(), Net()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    fit(wrapped, SharpnessAwareCallback(), **options)
    fit(ours, SharpnessAwareCallback(METHODS["SAM"]), **options)
    assert_same(wrapped.net, ours.net, tolerance=0)
    assert wrapped.accuracy.update_count == BATCHES


class Starred(Net):
    def training_step(self, *batch_and_index: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().training_step(*batch_and_index)


def test_training_step_gets_what_lightning_gives_it():
    starred, ours = Starred(), Net()
    fit(starred, SharpnessAwareCallback(METHODS["SAM"]))
    fit(ours, SharpnessAwareCallback(METHODS["SAM"]))
    assert_same(starred.net, ours.net, tolerance=0)
