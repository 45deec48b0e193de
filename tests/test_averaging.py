"""Averages of the weights: the numbers, BatchNorm's statistics, checkpoints, and that training does not notice."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

import steppe
from helpers import problems
from steppe.averaging import averaging, parse


def trained(
    average: Any = None, steps: int = 6, model: Any = None, captured: bool = False, device="cpu", skip=0
) -> Any:
    """Weights after each step, and the average."""
    model = problems.seeded(problems.batchnorm_dropout).to(device) if model is None else model
    fused = True if device == "cuda" else None  # as captured steps have it
    base = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9, fused=fused)  # exact in float32
    opt = steppe.wrap(base, "sam", model=model)
    kept = average(model) if average else None
    step = steppe.capture(lambda x, y: nn.functional.cross_entropy(model(x), y), opt)
    seen = []
    for day in problems.steps(steps)[skip:]:
        x, y = (t.to(device) for t in day.main)
        if captured:
            step(x, y)
        else:
            opt.step(lambda: nn.functional.cross_entropy(model(x), y))  # noqa: B023
        if kept is not None:
            kept.update()
        seen.append(problems.weights(model))
    return model, kept, seen


def ema(seen: list[torch.Tensor], decay: float) -> torch.Tensor:
    """Retyped: a mean with weights that the recursion gives."""
    mean = seen[0].clone()
    for n, w in enumerate(seen[1:], 1):
        beta = min(decay, (1 + n) / (10 + n))
        mean = beta * mean + (1 - beta) * w
    return mean


@pytest.mark.parametrize("decay", [0.0, 0.25, 0.999])
def test_an_ema_is_the_recursion(decay):
    _, average, seen = trained(lambda model: steppe.Averaging(model, ema=decay))
    torch.testing.assert_close(problems.weights(average.model), ema(seen, decay), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("start", [0, 2, 5])
def test_swa_is_the_mean_from_a_step_on(start):
    _, average, seen = trained(lambda model: steppe.Averaging(model, swa_from=start))
    torch.testing.assert_close(
        problems.weights(average.model), sum(seen[start:]) / len(seen[start:]), rtol=1e-13, atol=0
    )


def test_averages_equal_those_of_torch():
    model = problems.seeded(problems.batchnorm_dropout)
    theirs = torch.optim.swa_utils.AveragedModel(model)
    _, ours, seen = trained(lambda model: steppe.Averaging(model, swa_from=0), model=model)
    buffers = [b.clone() for b in model.buffers()]
    for w in seen:
        nn.utils.vector_to_parameters(w, model.parameters())
        theirs.update_parameters(model)
    # torch divides 1 by the count in float32
    torch.testing.assert_close(problems.weights(theirs.module), problems.weights(ours.model), rtol=1e-6, atol=1e-8)
    assert problems.same(buffers, [*ours.model.buffers()])


def test_swa_before_its_first_step():
    _, average, _ = trained(lambda model: steppe.Averaging(model, swa_from=6))
    assert not average.started


def test_averaging_does_not_change_training():
    without, _, _ = trained()
    state = torch.get_rng_state()
    with_, average, _ = trained(lambda model: steppe.Averaging(model, ema=0.5))
    assert problems.same(problems.everything(without), problems.everything(with_))
    average.estimate_batch_norm([day.main for day in problems.steps(3)])  # with dropout
    assert torch.equal(state, torch.get_rng_state())
    assert not any(p.requires_grad for p in average.model.parameters())


def test_batch_norm_gets_the_statistics_of_the_averaged_net():
    """The first layer sees the inputs themselves, and the batches are all of one size: plain means."""
    _, average, _ = trained(lambda model: steppe.Averaging(model, swa_from=0))
    days = [day.main for day in problems.steps(4)]
    average.estimate_batch_norm(days)
    first = average.model[0]
    torch.testing.assert_close(first.running_mean, torch.stack([x.mean(0) for x, _ in days]).mean(0))
    torch.testing.assert_close(first.running_var, torch.stack([x.var(0) for x, _ in days]).mean(0))
    assert (first.momentum, average.model[4].momentum, first.num_batches_tracked) == (0.1, None, 4)
    inner = copy.deepcopy(average.model).train()
    inner[3].p = 0.0
    last = [inner[:4](x) for x, _ in days]
    average.model[3].p = 0.0
    average.estimate_batch_norm(x for x, _ in days)
    torch.testing.assert_close(average.model[4].running_mean, torch.stack([h.mean(0) for h in last]).mean(0))


def test_in_place_swaps_the_averaged_weights_in():
    model, average, _ = trained(lambda model: steppe.Averaging(model, ema=0.5))
    before, places = [t.clone() for t in problems.everything(model)], [p.data_ptr() for p in model.parameters()]
    with average.in_place():
        assert problems.same(problems.everything(model), problems.everything(average.model))
    with contextlib.suppress(KeyError), average.in_place():
        raise KeyError
    assert problems.same(before, problems.everything(model)) and places == [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("text", ["ema:0.9", "swa:0.5"])
def test_an_average_resumes_from_a_checkpoint(text):
    _, whole, seen = trained(lambda model: averaging(model, text, 6))
    _, part, _ = trained(lambda model: averaging(model, text, 6), steps=4)
    model = problems.seeded(problems.batchnorm_dropout)
    again = averaging(model, text, 6)
    again.load_state_dict(copy.deepcopy(part.state_dict()))
    for w in seen[4:]:
        nn.utils.vector_to_parameters(w, model.parameters())
        again.update()
    assert torch.equal(problems.weights(again.model), problems.weights(whole.model))


@pytest.mark.parametrize("wrong", [{}, {"ema": 0.9, "swa_from": 1}, {"ema": 1.0}, {"swa_from": -1}, {"swa_from": 0.5}])
def test_wrong_settings(wrong):
    with pytest.raises(ValueError, match=r"ema|swa_from"):
        steppe.Averaging(nn.Linear(1, 1), **wrong)


@pytest.mark.parametrize("text", ["", "ema:1", "swa:x", "lawa:3", "ema:0.9:2", "ema:0%", "ema:101%", "ema:%", "swa:5%"])
def test_wrong_texts(text):
    with pytest.raises(ValueError, match="is not ema:DECAY"):
        parse(text)


def test_a_share_of_training():
    assert averaging(nn.Linear(1, 1), "swa", 100)._start == 75
    assert averaging(nn.Linear(1, 1), "ema:10%", 1000)._ema == 1 - 1 / 100
    assert averaging(nn.Linear(1, 1), "ema:10%", 5)._ema == 0, "a training of a few steps: its last weights"


@pytest.mark.cuda
@pytest.mark.parametrize("text", ["ema:0.9", "swa:0.5"])
def test_captured_steps_are_averaged(text):
    ends = []
    for captured in (False, True):
        model = problems.seeded(problems.batchnorm_dropout).cuda()
        model[4].momentum = 0.1  # None reads the count of batches from the device: such a step cannot be recorded
        _, average, _ = trained(lambda m: averaging(m, text, 8), 8, model, captured=captured, device="cuda")
        ends.append(problems.weights(average.model))
    assert torch.equal(*ends)


@pytest.mark.cuda
def test_update_does_not_synchronise_with_the_device():
    model = problems.seeded(problems.mlp).cuda()
    averages = [steppe.Averaging(model, ema=0.9), steppe.Averaging(model, swa_from=0)]
    for average in averages:
        average.update()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for average in averages:
            average.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_extra_state_of_a_module_is_left_alone():
    class Noted(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    model = Noted(2, 1)
    average = steppe.Averaging(model, swa_from=0)
    average.update()
    with average.in_place():
        assert torch.equal(model.weight, average.model.weight)


def test_the_average_of_a_compiled_model_is_a_plain_one():
    """Its checkpoint then loads into the model itself, whether it was compiled or not."""
    model = nn.Linear(3, 2)
    compiled: Any = torch.compile(model)
    assert list(steppe.Averaging(compiled, ema=0.9).model.state_dict()) == ["weight", "bias"]


def test_there_is_nothing_to_put_in_place_before_there_is_an_average():
    """The copy has the initial weights, which are no average of anything."""
    model = nn.Linear(2, 1)
    average = steppe.Averaging(model, swa_from=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="there is no average yet"), average.in_place():
            pass
        average.update()
    with average.in_place():
        assert torch.equal(model.weight, average.model.weight)


class Masked(nn.Module):
    """Makes its buffers in the forward pass, as large as the batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("lazy", None)
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("expanded", torch.zeros(1).expand(4))

    def forward(self, x):
        self.lazy = x.sum(0) if self.lazy is None else self.lazy + 1
        self.replaced = x.mean(1)
        if not hasattr(self, "new"):
            self.register_buffer("new", x.sum(0), persistent=False)
        return self.inner(x)


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_that_a_forward_makes_are_copied_by_name():
    model = Masked()
    average = steppe.Averaging(model, ema=0.5)
    average.update()
    first = named(model)
    assert average.model.lazy is None and not hasattr(average.model, "new")
    model(torch.randn(5, 3, dtype=torch.float64))
    with average.in_place():
        now = named(model)
        assert now.keys() == {"replaced", "expanded", "new"} and torch.equal(now["replaced"], first["replaced"])
    for size in (5, 6, 6):
        model(torch.randn(size, 3, dtype=torch.float64))
        average.update()
        kept = named(model)
        assert kept.keys() == named(average.model).keys() == {"lazy", "replaced", "expanded", "new"}
        assert problems.same([*kept.values()], [*named(average.model).values()])
    assert model.state_dict().keys() == average.model.state_dict().keys()
    model(torch.randn(7, 3, dtype=torch.float64))
    objects, later = dict(model.named_buffers()), named(model)
    with average.in_place():
        assert problems.same([*named(model).values()], [*kept.values()])
        model(torch.randn(8, 3, dtype=torch.float64))
    assert all(buffer is objects[name] for name, buffer in model.named_buffers())
    assert problems.same([*named(model).values()], [*later.values()])


def test_in_place_swaps_buffers_that_are_not_saved():
    model = nn.Linear(3, 2, dtype=torch.float64)
    model.register_buffer("count", torch.zeros(2), persistent=False)
    average: Any = steppe.Averaging(model, ema=0.5)
    counts: Any = model.get_buffer("count")
    counts.add_(1)
    average.update()
    counts.add_(1)
    with average.in_place():
        assert counts.tolist() == [1, 1]
    assert counts.tolist() == [2, 2] and average.model.count.tolist() == [1, 1]


def test_an_error_while_statistics_are_estimated_leaves_the_layers_their_momentum():
    def batches():
        yield torch.randn(5, 64, dtype=torch.float64)
        raise OSError("the file is gone")

    model = problems.seeded(problems.batchnorm_dropout).eval()
    average = steppe.Averaging(model, ema=0.5)
    with pytest.raises(OSError, match="the file is gone"):
        average.estimate_batch_norm(batches())
    assert (average.model[0].momentum, average.model[4].momentum, average.model.training) == (0.1, None, False)
