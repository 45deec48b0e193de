"""The net for trainings of seconds: its whitening layer on real images, how its layers begin, and their order."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.image_excerpt import cifar10, images
from steppe.lab.data import prepare
from steppe.lab.models import build
from steppe.lab.models.fast import Highest, Scaled, ShiftNorm, Whitening
from steppe.lab.training.run import fit_whitening

CIFAR = (3, 32, 32)


def pictures(count: int = 64) -> torch.Tensor:
    return images("cifar10", count).double() / 255


def fast_cnn() -> Any:
    return build("fast-cnn", CIFAR, 10)


def test_whitened_patches_are_uncorrelated_with_variance_one_and_mean_zero():
    x, layer = pictures(), Whitening(3).double()
    layer.fit(x, eps=0.0)
    out = layer(x).detach().transpose(0, 1).flatten(1)
    assert out.shape == (24, 64 * 31 * 31)
    torch.testing.assert_close(out[:12], -out[12:])
    torch.testing.assert_close(torch.cov(out[:12], correction=0), torch.eye(12).double(), atol=1e-8, rtol=0)
    torch.testing.assert_close(out.mean(1), torch.zeros(24).double(), atol=1e-10, rtol=0)


def test_eps_shrinks_a_direction_by_its_variance():
    """The variance after whitening is v / (v + eps), where v is the variance of the patches in a direction."""
    x, layer = pictures(), Whitening(3).double()
    layer.fit(x, eps=0.01)
    patches = F.unfold(x, 2).transpose(0, 1).flatten(1)
    v = torch.linalg.eigvalsh(torch.cov(patches, correction=0))
    out = layer(x).detach().transpose(0, 1).flatten(1)[:12]
    torch.testing.assert_close(torch.cov(out, correction=0), (v / (v + 0.01)).diag(), atol=1e-8, rtol=0)


def test_patch_moments_are_computed_in_chunks():
    x = pictures(64)
    one, parts = Whitening(3).double(), Whitening(3).double()
    one.fit(x.repeat(8, 1, 1, 1))  # 512: two parts
    parts.fit(x)
    torch.testing.assert_close(one.weight.square(), parts.weight.square())  # the sign of a direction is free


def test_before_it_is_fitted_it_shows_the_pixels_of_a_patch():
    x = pictures(2)
    out = Whitening(3).double()(x)
    assert torch.equal(out[:, :12], F.unfold(x, 2).view(2, 12, 31, 31)) and torch.equal(out[:, 12:], -out[:, :12])


def test_a_net_is_fitted_to_the_first_training_examples():
    data, net = cifar10(), fast_cnn()
    fit_whitening(net, data, most=32)
    expected = Whitening(3)
    expected.fit(prepare(data.train.take(torch.arange(32))[0], data))
    assert torch.equal(net[0].weight, expected.weight) and torch.equal(net[0].bias, expected.bias)
    assert not torch.equal(net[0].weight, Whitening(3).weight)


def test_convolutions_begin_by_passing_their_inputs_on():
    torch.manual_seed(3)
    convolutions = [m for m in fast_cnn().modules() if isinstance(m, nn.Conv2d)]
    assert [tuple(m.weight.shape[:2]) for m in convolutions] == [
        (64, 24), (64, 64), (256, 64), (256, 256), (256, 256), (256, 256),
    ]  # fmt: skip
    for layer in convolutions:
        x = torch.rand(1, layer.in_channels, 4, 4)
        out = layer(x)
        assert torch.equal(out[:, : layer.in_channels], x)
        new = layer.weight[layer.in_channels :]
        assert not len(new) or 0 < new.abs().max() <= (9 * layer.in_channels) ** -0.5  # torch's initialisation


def test_the_order_of_its_layers_and_the_sizes_between_them():
    net = fast_cnn()
    act, norm, pool, conv = nn.GELU, ShiftNorm, nn.MaxPool2d, nn.Conv2d
    group = [conv, pool, norm, act, conv, norm, act]
    assert [type(m) for m in net] == [Whitening, act, *group * 3, Highest, nn.Linear, Scaled]
    sizes, x = [], pictures(2).float()
    for layer in net:
        x = layer(x)
        sizes += [x.shape[-1]] if isinstance(layer, (Whitening, pool)) else []
    assert sizes == [31, 15, 7, 3] and x.shape == (2, 10)


def test_constants_are_buffers():
    net = fast_cnn()
    names = {name for name, _ in net.named_parameters()}
    constant = {name for name, _ in net.named_buffers() if name.endswith("weight")}
    norms = [f"{i}" for i, m in enumerate(net) if isinstance(m, ShiftNorm)]
    assert constant == {"0.weight", *(f"{i}.weight" for i in norms)}
    assert "0.bias" in names and {f"{i}.bias" for i in norms} < names and not names & constant
    assert all((net[int(i)].weight == 1).all() for i in norms)


def test_its_norm_is_batch_norm_with_a_factor_of_one():
    own, torchs = ShiftNorm(3).double(), nn.BatchNorm2d(3, eps=1e-12, momentum=0.4).double()
    x = pictures(8)
    assert torch.equal(own(x), torchs(x)) and torch.equal(own.eval()(x), torchs.eval()(x))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_highest_value_has_a_gradient_in_compiled_bf16():
    """Ties are common in bf16; each gradient goes to one of the entries that are the highest."""
    torch.compiler.reset()
    x = torch.randn(4, 3, 6, 6).bfloat16().requires_grad_()
    highest = torch.compile(nn.Sequential(nn.GELU(), Highest()))
    (grad,) = torch.autograd.grad(highest(x).sum(), x)
    assert grad.isfinite().all() and (grad.flatten(2).count_nonzero(-1) == 1).all()
