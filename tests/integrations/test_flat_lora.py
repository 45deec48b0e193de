"""Flat-LoRA against its equations, and in the set-ups in which published code is wrong."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import steppe
from steppe.integrations.flat_lora import FlatLoRA

peft = pytest.importorskip("peft")
SIGMA, SCALING = 0.3, 2.0  # LoRA's alpha over its rank


class Net(nn.Module):
    def __init__(self, convolves: bool = False):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3, bias=False)
        self.image = nn.Conv2d(1, 1, 1) if convolves else None
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.image is not None:
            x = self.image(x[:, None, None])[:, 0, 0]
        run = lambda x: torch.tanh(self.first(x))  # noqa: E731
        hidden = checkpoint(run, x, use_reentrant=False) if self.checkpointed else run(x)
        assert isinstance(hidden, Tensor)
        return self.second(hidden)


def adapted(dtype: torch.dtype = torch.float64, convolves: bool = False, **config: Any) -> Any:
    torch.manual_seed(0)
    targets = ["first", "second", *(["image"] if convolves else [])]
    settings = {"r": 2, "lora_alpha": 4, "target_modules": targets, "init_lora_weights": False, **config}
    return peft.get_peft_model(Net(convolves), peft.LoraConfig(**settings)).to(dtype)


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator, dtype=dtype), torch.randint(3, (8,), generator=generator)


def loss_of(model: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    x, y = batch(dtype)
    return F.cross_entropy(model(x), y)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_the_equations(model: Any, strength: float, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss at W' + ε with tensors typed out, and the gradients of all A and B."""
    random = torch.Generator()
    random.set_state(state)
    x, y = batch()
    adapters = [model.base_model.model.first, model.base_model.model.second]
    leaves = [getattr(one, part)["default"].weight for one in adapters for part in ("lora_A", "lora_B")]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    for i, adapter in enumerate(adapters):
        weight, (a, b) = adapter.base_layer.weight, leaves[2 * i : 2 * i + 2]
        merged = weight + SCALING * b @ a
        seed = int(torch.randint(2**62, (), generator=random))
        normal = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=weight.dtype)
        noise = torch.stack([
            strength * math.sqrt(sum(v**2 for v in row.tolist())) / math.sqrt(len(row)) * xi
            for row, xi in zip(merged, normal, strict=True)
        ])  # fmt: skip
        x = F.linear(x, merged + noise, adapter.base_layer.bias)
        x = torch.tanh(x) if i == 0 else x
    loss = F.cross_entropy(x, y)
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize(("progress", "strength"), [(None, 1.0), (0.5, 0.5), (0.25, (1 - math.sqrt(0.5)) / 2)])
def test_loss_and_gradients_are_those_of_the_equations(progress, strength):
    model = adapted()
    noise = FlatLoRA(model, SIGMA)
    if progress is not None:
        noise.progress = progress
    torch.manual_seed(3)
    expected, grads = by_the_equations(model, SIGMA * strength, torch.get_rng_state())
    loss = loss_of(model)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=0)
    own = gradients(model)
    assert len(own) == 4 and all("lora_" in name for name in own)
    for mine, theirs in zip(own.values(), grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


def test_the_weights_are_never_written_to():
    model = adapted(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    versions = [p._version for p in model.parameters()]
    with FlatLoRA(model, SIGMA):
        loss_of(model, torch.bfloat16).backward()
        after = model.state_dict()
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
        assert [p._version for p in model.parameters()] == versions


@pytest.mark.parametrize("off", ["eval", "no sigma", "begin", "removed", "disabled", "merged"])
def test_without_noise_nothing_changes(off):
    model, plain = adapted(), adapted()
    noise = FlatLoRA(model, 0.0 if off == "no sigma" else SIGMA)
    if off == "begin":
        noise.progress = 0.0
    if off == "removed":
        noise.remove()
    for one in (model, plain):
        if off == "eval":
            one.eval()
        if off == "disabled":
            one.base_model.disable_adapter_layers()
        if off == "merged":
            one.merge_adapter()
    state = torch.get_rng_state()
    assert torch.equal(loss_of(model), loss_of(plain))
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn either


def test_gradient_checkpointing_sees_the_same_noise():
    grads = []
    for checkpointed in (False, True):
        model = adapted(lora_dropout=0.3)
        model.base_model.model.checkpointed = checkpointed
        FlatLoRA(model, SIGMA)
        torch.manual_seed(3)
        loss_of(model).backward()
        grads.append(gradients(model))
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_all_looks_of_a_step_see_the_same_noise():
    """So that SAM's first look is that of plain training, and a radius of zero changes nothing."""
    models = adapted(), adapted()
    for model, method in zip(models, (steppe.Plain(), steppe.SAM(rho=0.0)), strict=True):
        FlatLoRA(model, SIGMA)
        base = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        opt = steppe.SharpnessAware(base, method, model=model)
        torch.manual_seed(3)
        for _ in range(3):
            opt.step(lambda model=model: loss_of(model))
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_each_forward_pass_has_other_noise():
    model = adapted()
    FlatLoRA(model, SIGMA)
    assert loss_of(model) != loss_of(model)


def test_autocast_uses_its_precision_in_both_passes():
    model = adapted(torch.float32)
    FlatLoRA(model, SIGMA)
    with torch.autocast("cpu", torch.bfloat16):
        x, y = batch(torch.float32)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
    loss.backward()
    assert logits.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in gradients(model).values())


def test_a_copy_of_the_model_has_noise_of_its_own():
    model = adapted()
    noise = FlatLoRA(model, SIGMA)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # must not reach the copy
    torch.manual_seed(3)
    expected, _ = by_the_equations(twin, SIGMA, torch.get_rng_state())
    torch.testing.assert_close(loss_of(twin).detach(), expected, rtol=1e-12, atol=0)
    noise.remove()


def test_a_second_one_replaces_the_first():
    model = adapted()
    first, second = FlatLoRA(model, 0.1), FlatLoRA(model, SIGMA)
    first.remove()
    torch.manual_seed(3)
    expected, _ = by_the_equations(model, SIGMA, torch.get_rng_state())
    torch.testing.assert_close(loss_of(model).detach(), expected, rtol=1e-12, atol=0)
    second.remove()
    assert not [layer for layer in model.modules() if "forward" in vars(layer)]


def test_adapted_convolutions_have_no_noise():
    model = adapted(convolves=True)
    FlatLoRA(model, SIGMA)
    assert "forward" not in vars(model.base_model.model.image.base_layer)
    assert "forward" in vars(model.base_model.model.first.base_layer)


class Quantised(nn.Linear):
    """Stands in for the layers of quantising libraries, which are subclasses of nn.Linear."""


def quantised(model: Any) -> None:
    model.base_model.model.first.base_layer.__class__ = Quantised


def offloaded(model: Any) -> None:
    layer = model.base_model.model.second.base_layer
    layer.forward = lambda x: F.linear(x, layer.weight)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FlatLoRA(Net()), "get_peft_model"),
        (lambda: FlatLoRA(adapted(use_dora=True)), "DoRA"),
        (lambda: FlatLoRA(changed(quantised)), "quantised"),
        (lambda: FlatLoRA(changed(offloaded)), "replaced the forward pass"),
        (lambda: FlatLoRA(adapted(), sigma=-1), "sigma"),
        (lambda: FlatLoRA(adapted(), sigma=math.nan), "sigma"),
        (lambda: setattr(FlatLoRA(adapted()), "progress", 2), "from 0 to 1"),
        (lambda: trained_weight(), "frozen weights"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(make, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        make()


def test_a_refused_model_is_as_it_was():
    model = changed(offloaded)
    with pytest.raises(RuntimeError):
        FlatLoRA(model)
    assert "forward" not in vars(model.base_model.model.first.base_layer)


def changed(change: Any) -> Any:
    model = adapted()
    change(model)
    return model


def trained_weight() -> None:
    model = adapted()
    FlatLoRA(model)
    model.base_model.model.first.base_layer.weight.requires_grad_()
    loss_of(model)


def test_second_derivatives_pass_through():
    model = adapted()
    FlatLoRA(model, SIGMA)
    x, y = batch()
    x.requires_grad_()

    def gradient(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return torch.autograd.grad(F.cross_entropy(model(x), y), x, create_graph=True)[0]

    assert torch.autograd.gradcheck(gradient, (x,))


def test_the_seed_is_drawn_on_the_cpu_whatever_the_default_device():
    model = adapted()
    FlatLoRA(model, SIGMA)
    x, _ = batch()
    with torch.device("meta"):
        output = model(x)
    assert output.device.type == "cpu"
