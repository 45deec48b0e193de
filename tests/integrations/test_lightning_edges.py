"""Lightning: batches without a loss, exceptions, other callbacks, manual optimization, and what is refused."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steppe
from helpers.plain_loop import METHODS, assert_same, plain_loop, windows_of

lightning = pytest.importorskip("lightning")

from integrations.lightning_problem import BATCHES, Net, NoSchedule, Unmodified, fit, loader, sixteen  # noqa: E402
from steppe.integrations.lightning import SharpnessAwareCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),  # Lightning's, on torch 2.13
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # torch's, when a first step is skipped
]


class Silent(Net):
    """Has no loss for some batches: Lightning then leaves them out."""

    def __init__(self, silent: set[int]):
        super().__init__()
        self.silent = silent

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
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


class Pops(Net):
    """Takes the labels out of its batch, as is usual with models of Hugging Face."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> dict[str, Tensor]:
        return dict(zip("xy", batch, strict=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["x"], batch.pop("y")), batch_idx)


def test_a_step_may_take_entries_out_of_its_batch():
    """In the second look they were missing."""
    plain, pops = Net(), Pops()
    for module in (plain, pops):
        fit(module, SharpnessAwareCallback(METHODS["SAM"]))
    assert_same(pops.net, plain.net)


class Interrupted(Net):
    """Is interrupted in the second look of the second step."""

    looks: ClassVar[Any] = None  # of the class: what looks count in the module is undone

    def __init__(self) -> None:
        super().__init__()
        Interrupted.looks = iter(range(2 * 2 + 1 * 2 + 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if next(Interrupted.looks, None) is None:
            raise KeyError("interrupted")
        return super().training_step(batch, batch_idx)


class Catch(lightning.Callback):
    """What another callback sees of the weights when there was an exception: it may want to save them."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.before = [t.clone() for t in pl_module.net.state_dict().values()]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.after = [t.clone() for t in pl_module.net.state_dict().values()]
        self.moved = bool(pl_module.net[1].weight.sub(Net().net.get_parameter("1.weight")).any())


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
    def training_step(self, dataloader_iter: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
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
        precision: Any = self.trainer.precision_plugin
        for _ in optimizer.optimizer.passes(precision.scaler):
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
