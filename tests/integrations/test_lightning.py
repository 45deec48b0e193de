"""Lightning: whatever the precision and the accumulation, a run is the plain loop, and nothing happens twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe
from helpers.plain_loop import METHODS, assert_same, plain_loop, windows_of
from helpers.problems import batchnorm_dropout, digits

lightning = pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from torchmetrics import Accuracy, CatMetric  # noqa: E402

from steppe.integrations.lightning import SharpnessAwareCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),  # Lightning's, on torch 2.13
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # torch's, when a first step is skipped
]

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


def fit(module: lightning.LightningModule, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Any:
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    options = {"max_epochs": 1, "accelerator": "cpu", "callbacks": list(callbacks)} | quiet | options
    trainer = lightning.Trainer(**options)
    torch.manual_seed(1)  # dropout
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def by_hand(method: steppe.Method, accumulate: int = 1, epochs: int = 1, **options: Any) -> tuple[nn.Module, list]:
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


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_is_the_plain_loop(name: str, accumulate: int):
    module = Net()
    fit(module, SharpnessAwareCallback(METHODS[name]), accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    expected, _ = by_hand(METHODS[name], accumulate, clip=0.5)
    assert_same(module.net, expected.net)


def sixteen(init_scale: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=init_scale))


@pytest.mark.parametrize("name", ["SAM", "FrobSAM"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**24])  # the second overflows at first: those steps are skipped
def test_half_precision_with_a_scaler_is_the_plain_loop(name: str, accumulate: int, scale: float):
    module, plugin = Net(), sixteen(scale)
    callback = SharpnessAwareCallback(METHODS[name])
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "max_epochs": 3}
    trainer = fit(module, callback, plugins=[plugin], **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    expected, _ = by_hand(METHODS[name], accumulate, 3, clip=0.5, scaler=scaler, autocast=torch.float16)
    assert_same(module.net, expected.net)
    assert plugin.scaler.get_scale() == scaler.get_scale()
    skipped = trainer.global_step - callback.optimizer.steps
    assert (skipped > 0) == (scaler.get_scale() < scale) == (scale == 2.0**24)


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
    accuracy = module.accuracy
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

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batch", torch.tensor(0))
        self.met: list[int] = []

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


class Unmodified(Net):
    """The optimizer wrapped where it is made, for use without the callback."""

    def configure_optimizers(self) -> Any:
        return steppe.SharpnessAware(super().configure_optimizers()["optimizer"], METHODS["SAM"], model=self)


class WrappedAndScheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = steppe.SharpnessAware(super().configure_optimizers()["optimizer"], METHODS["SAM"], model=self)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class NoSchedule(Net):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


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
    def training_step(self, *batch_and_index: Any) -> Any:
        return super().training_step(*batch_and_index)


def test_training_step_gets_what_lightning_gives_it():
    starred, ours = Starred(), Net()
    fit(starred, SharpnessAwareCallback(METHODS["SAM"]))
    fit(ours, SharpnessAwareCallback(METHODS["SAM"]))
    assert_same(starred.net, ours.net, tolerance=0)


class Silent(Net):
    """Has no loss for some batches: Lightning then leaves them out."""

    def __init__(self, silent: set[int]):
        super().__init__()
        self.silent = silent

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        y = batch[1]
        return None if y[0].item() in self.silent else F.cross_entropy(self.net(batch[0]), y)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("silent", [set(), {0}, {6}, {0, 6, 2}])
def test_batches_without_a_loss_are_left_out(silent: set[int]):
    module = Silent(silent)
    batches = [batch for batch in loader() if batch[1][0].item() not in silent]
    assert bool(silent) == (len(batches) < BATCHES)
    callback = SharpnessAwareCallback(METHODS["SAM"])
    fit(module, callback, accumulate_grad_batches=2, gradient_clip_val=0.5)
    windows = [[b for b in w if b[1][0].item() not in silent] for w in windows_of(list(loader()), 2)]
    expected = Net()
    optimizer = steppe.SharpnessAware(
        torch.optim.SGD(expected.net.parameters(), lr=0.1, momentum=0.9), METHODS["SAM"], model=expected.net
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    torch.manual_seed(1)
    list(loader())
    for window in windows:
        if window:
            plain_loop(optimizer, [window], lambda b: F.cross_entropy(expected.net(b[0]), b[1]) / 2, clip=0.5)
        scheduler.step()
    assert callback.optimizer.steps == optimizer.steps
    assert_same(module.net, expected.net)


class Interrupted(Net):
    """Is interrupted in the second look of the second step."""

    calls_until = 2 * 2 + 1 * 2 + 2

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.calls_until -= 1
        if self.calls_until == 0:
            raise KeyError("interrupted")
        return super().training_step(batch, batch_idx)


class Catch(lightning.Callback):
    """What another callback sees of the weights when there was an exception: it may want to save them."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.before = [t.clone() for t in pl_module.net.state_dict().values()]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.after = [t.clone() for t in pl_module.net.state_dict().values()]
        self.moved = bool(pl_module.net[1].weight.sub(Net().net[1].weight).any())


def test_an_exception_brings_the_weights_home_before_anyone_else_sees_them():
    module, catch, callback = Interrupted(), Catch(), SharpnessAwareCallback(METHODS["SAM"])
    with pytest.raises(KeyError, match="interrupted"):
        fit(module, catch, callback, accumulate_grad_batches=2)
    assert catch.moved  # one step was taken
    assert all(torch.equal(a, b) for a, b in zip(catch.before, catch.after, strict=True))
    assert callback.optimizer.steps == 1
    assert "log" not in vars(module)


class StopIn(lightning.Callback):
    """Stops after the first batch of the second step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise KeyError("stop")


def test_a_step_that_was_left_changes_nothing_later_and_a_callback_serves_again():
    module, callback = Net(), SharpnessAwareCallback(METHODS["GAM"])
    with pytest.raises(KeyError, match="stop"):
        fit(module, callback, StopIn(), accumulate_grad_batches=2)
    with torch.no_grad():
        for value in module.net.state_dict().values():
            value.zero_()
    fit(Net(), SharpnessAwareCallback(METHODS["SAM"]))
    assert not any(bool(value.any()) for value in module.net.state_dict().values())
    again, expected = Net(), Net()
    fit(again, callback, accumulate_grad_batches=2)
    fit(expected, SharpnessAwareCallback(METHODS["GAM"]), accumulate_grad_batches=2)
    assert not any(bool(value.any()) for value in module.net.state_dict().values())
    assert_same(again.net, expected.net, tolerance=0)


@pytest.mark.parametrize("scheduled", [False, True])
def test_after_fitting_the_optimizer_is_its_owners_again(scheduled: bool):
    class Lent(Net):
        def configure_optimizers(self) -> Any:
            return optimizer

    module = Lent()
    base = torch.optim.SGD(module.net.parameters(), lr=0.1)
    optimizer = steppe.SharpnessAware(base, METHODS["CRSAM"], model=module.net)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 100)
    before = vars(optimizer).get("step")
    assert (before is not None) == scheduled
    fit(module, SharpnessAwareCallback())
    with pytest.raises(KeyError, match="stop"):
        fit(module, SharpnessAwareCallback(), StopIn())
    assert vars(optimizer).get("step") is before
    x, y = next(iter(loader()))
    steps = optimizer.steps
    optimizer.step(lambda: F.cross_entropy(module.net(x), y))
    fit(module)  # without the callback
    assert optimizer.steps == steps + 1 + BATCHES and optimizer.metrics["looks"] == 3


class DrawsItself(NoSchedule):
    def training_step(self, dataloader_iter: Any) -> Any:
        raise AssertionError("never called")


class WithoutOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor", "ignore:.*run with no optimizer")
@pytest.mark.parametrize("method", [steppe.SSAM(), "dataloader_iter", "manual", "none", "twice", "nothing"], ids=str)
def test_what_cannot_work_says_so(method: Any):
    module, callback = NoSchedule(), SharpnessAwareCallback(METHODS["SAM"])
    if method == "manual":
        module.automatic_optimization = False
    elif method == "none":
        callback = SharpnessAwareCallback()
    elif method == "twice":
        module = Unmodified()
    elif method == "dataloader_iter":
        module = DrawsItself()
    elif method == "nothing":
        module = WithoutOptimizer()
    else:
        callback = SharpnessAwareCallback(method)
    with pytest.raises(
        (RuntimeError, TypeError, ValueError), match=r"single examples|draws its batches|passes|method|no parameters"
    ):
        fit(module, callback)


class Stopping(Net):
    """Leaves out a batch now and then, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.drawn.append(torch.rand(()).item())
        return None if self.drawn[-1] < 0.5 else F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_pass_without_a_step_is_not_undone():
    """Random numbers and BatchNorm's statistics go on as without the callback."""
    plain, module = Stopping(), Stopping()
    fit(plain, max_epochs=2)
    fit(module, SharpnessAwareCallback(steppe.Plain()), max_epochs=2)
    assert module.drawn == plain.drawn and len(set(plain.drawn)) == 2 * BATCHES
    assert_same(module.net, plain.net)


@pytest.mark.filterwarnings("ignore:.*SWA")
def test_weights_can_be_averaged():
    """Lightning makes a scheduler for it half-way, and ends with passes for BatchNorm alone.

    (After the last of them it steps once more, along an old gradient; with the callback there is no such step.)
    """
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    def run(*callbacks: Any) -> nn.Module:
        module = Net()
        averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
        fit(module, *callbacks, averaging, max_epochs=3)
        return module.net

    ours, theirs = (dict(net.named_buffers()) for net in (run(SharpnessAwareCallback(steppe.Plain())), run()))
    assert ours.keys() == theirs.keys() and ours["0.num_batches_tracked"] == BATCHES
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-7)


class Manual(Net):
    """With a loop of its own, as the documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return steppe.SharpnessAware(torch.optim.SGD(self.net.parameters(), lr=0.1), steppe.SAM(), model=self.net)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in optimizer.optimizer.passes():
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step()


class ManualHalf(Manual):
    def configure_optimizers(self) -> Any:
        return steppe.SharpnessAware(torch.optim.SGD(self.net.parameters(), lr=0.1), steppe.WSAM(), model=self.net)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in optimizer.optimizer.passes(self.trainer.precision_plugin.scaler):
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step()


def test_manual_optimization_in_half_precision_is_the_plain_loop():
    module, expected = ManualHalf(), ManualHalf()
    trainer = fit(module, plugins=[sixteen(2.0**10)])
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**10), expected.configure_optimizers()
    torch.manual_seed(1)
    batches, half = [[batch] for batch in loader()], {"scaler": scaler, "autocast": torch.float16}
    plain_loop(optimizer, batches, lambda batch: F.cross_entropy(expected.net(batch[0]), batch[1]), **half)
    assert trainer.global_step == trainer.optimizers[0].steps == optimizer.steps == BATCHES
    assert_same(module.net, expected.net)


def test_manual_optimization_counts_steps():
    trainer = fit(Manual(), max_epochs=2, max_steps=5)
    assert trainer.global_step == 5 and trainer.optimizers[0].steps == 5
