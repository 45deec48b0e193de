"""accelerate: the usual loop, with one call changed, is the plain loop."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import steppe
from helpers.plain_loop import METHODS, assert_same, plain_loop, windows_of
from helpers.problems import batchnorm_dropout, digits, seeded

accelerate = pytest.importorskip("accelerate")

from steppe.integrations.accelerate import Backward, require_supported  # noqa: E402

BATCHES, SIZE = 7, 16


def loader() -> DataLoader:
    x, y = digits(torch.float32)
    return DataLoader(TensorDataset(x[: BATCHES * SIZE], y[: BATCHES * SIZE]), batch_size=SIZE)


def problem(name: str) -> tuple[Any, steppe.SharpnessAware, Any]:
    net = seeded(batchnorm_dropout, dtype=torch.float32)
    base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = steppe.SharpnessAware(base, METHODS[name], model=net)
    return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def train(accelerator: Any, name: str, clip: float | None = 0.5) -> tuple[Any, Any, list[float]]:
    net, optimizer, scheduler = problem(name)
    model, prepared, batches, schedule = accelerator.prepare(net, optimizer, loader(), scheduler)
    backward = Backward(accelerator, model, prepared)

    def loss_of(batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(1)
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            losses.append(backward(loss_of, batch).item())
            if accelerator.sync_gradients and clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            prepared.step()
            schedule.step()
            prepared.zero_grad()
    return net, optimizer, losses


def by_hand(name: str, accumulate: int, **options: Any) -> tuple[Any, Any, list[float]]:
    net, optimizer, scheduler = problem(name)
    torch.manual_seed(1)
    losses = plain_loop(
        optimizer,
        windows_of(list(loader()), accumulate),
        lambda batch: F.cross_entropy(net(batch[0]), batch[1]) / accumulate,
        clip=0.5,
        scheduler=scheduler,
        waits=True,
        **options,
    )
    return net, optimizer, losses


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_is_the_plain_loop(name: str, accumulate: int):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    net, optimizer, losses = train(accelerator, name)
    expected, by_hand_optimizer, shares = by_hand(name, accumulate)
    assert_same(net, expected)
    assert losses == pytest.approx([accumulate * share for share in shares], abs=1e-6)
    assert optimizer.steps == by_hand_optimizer.steps == -(-BATCHES // accumulate)


def with_a_scaler(accelerator: Any, scale: float) -> Any:
    """accelerate uses no GradScaler on a CPU: give it one."""
    accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=scale), True
    return accelerator


@pytest.mark.parametrize("scale", [2.0**10, 2.0**20])  # the second overflows at first: those steps are skipped
def test_half_precision_with_a_scaler_is_the_plain_loop(scale: float):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="fp16")
    net, optimizer, _ = train(with_a_scaler(accelerator, scale), "FrobSAM")
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    expected, by_hand_optimizer, _ = by_hand("FrobSAM", 2, scaler=scaler, autocast=torch.float16)
    assert optimizer.steps == by_hand_optimizer.steps
    assert (optimizer.steps < 4) == (scale == 2.0**20)
    assert accelerator.scaler.get_scale() == scaler.get_scale()
    assert_same(net, expected)


def test_bfloat16_is_the_plain_loop():
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    net, _, _ = train(accelerator, "CRSAM")
    expected, _, _ = by_hand("CRSAM", 2, autocast=torch.bfloat16)
    assert_same(net, expected)


def test_a_saved_state_goes_on_as_if_nothing_had_been(tmp_path):
    def run(stop: bool) -> Any:
        accelerator = accelerate.Accelerator(cpu=True)
        net, optimizer, _ = problem("LookSAM")
        model, prepared = accelerator.prepare(net, optimizer)
        backward = Backward(accelerator, model, prepared)
        for i, batch in enumerate(loader()):
            torch.manual_seed(i)
            backward(lambda x, y: F.cross_entropy(model(x), y), *batch)
            prepared.step()
            prepared.zero_grad()
            if stop and i == 2:
                accelerator.save_state(str(tmp_path))
                with torch.no_grad():
                    next(net.parameters()).zero_()
                optimizer.load_state_dict(problem("LookSAM")[1].state_dict())
                accelerator.load_state(str(tmp_path))
        return net

    assert_same(run(stop=True), run(stop=False), tolerance=0)


def test_what_cannot_be_right_says_so():
    accelerator = accelerate.Accelerator(cpu=True)
    net, optimizer, _ = problem("SAM")
    model, prepared = accelerator.prepare(net, optimizer)
    x, y = next(iter(loader()))
    accelerator.backward(F.cross_entropy(model(x), y))
    with pytest.raises(RuntimeError, match="step\\(\\) needs a direction"):
        prepared.step()
    with pytest.raises(TypeError, match="needs a SharpnessAware"):
        Backward(accelerator, model, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="auxiliary must be"):
        Backward(accelerator, model, prepared, auxiliary="fresh")


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_strategies_that_hide_the_gradients_are_refused(kind: str):
    other: Any = types.SimpleNamespace(distributed_type=accelerate.DistributedType[kind], is_fsdp2=False)
    with pytest.raises(RuntimeError, match="does not expose the gradients"):
        require_supported(other)
