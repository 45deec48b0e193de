"""What extra looks must not disturb, and what they must see: each test fails on the construct it names."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import steppe
from helpers import problems
from helpers.problems import by_closure, seeded
from steppe import GSAM, SAM, Plain, SharpnessAware


def frozen(model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


def losses_of_looks(opt, model):
    """The losses in the looks of one step, on one batch."""
    losses = []
    for _ in opt.passes():
        loss = problems.loss(model, problems.steps(1)[0].main)
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_moves_once_a_step(momentum):
    """Not with momentum = 0 in the extra looks: that still counts batches and breaks cumulative averages."""
    model = seeded(lambda: nn.Sequential(nn.BatchNorm1d(64, momentum=momentum), nn.Linear(64, 10)))
    opt = SharpnessAware(frozen(model), steppe.CRSAM(), model)
    data = problems.steps(3)
    for d in data:
        by_closure(opt, model, d)
    means = torch.stack([d.main[0].mean(0) for d in data])
    expected = means.mean(0) if momentum is None else 0.1 * (0.81 * means[0] + 0.9 * means[1] + means[2])
    torch.testing.assert_close(model[0].running_mean, expected)
    assert model[0].num_batches_tracked == 3 and model[0].momentum == momentum


def test_every_look_starts_from_the_same_buffers():
    """Spectral norm iterates on a buffer in its forward: with rho = 0 all looks must see the same function."""
    model = seeded(lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(64, 10))))
    first, second = losses_of_looks(SharpnessAware(frozen(model), GSAM(rho=0.0), model), model)
    assert first == second


def test_a_buffer_that_forward_replaces_is_restored():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 10)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return self.linear(x)

    model = seeded(Counter)
    opt = SharpnessAware(frozen(model), steppe.CRSAM(), model)
    for d in problems.steps(3):
        by_closure(opt, model, d)
    assert model.calls == 3


def test_a_buffer_that_forward_replaces_in_some_steps_is_restored():
    """What is known of the buffers after the first look of the step before need not hold in this one."""

    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 10)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            if self.calls == 3:
                self.last, self.calls = x[0, 0].detach(), self.calls + 10
            return self.linear(x)

    model = seeded(Growing)
    opt = SharpnessAware(frozen(model), steppe.CRSAM(), model)
    data = problems.steps(4)
    for d in data:
        by_closure(opt, model, d)
    assert model.calls == 14 and model.last == data[2].main[0][0, 0]


def test_buffers_of_all_kinds_are_restored_to_the_bit():
    class Kinds(nn.Module):
        nan: Tensor
        flags: Tensor

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 10)
            self.register_buffer("count", torch.tensor(2**40))
            self.register_buffer("nan", torch.tensor([0x7FA00001], dtype=torch.int32).view(torch.float32))
            self.register_buffer("gaps", torch.arange(6.0).reshape(2, 3)[:, ::2])
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("coarse", torch.ones(2, dtype=torch.bfloat16))
            self.register_buffer("fine", torch.ones(2, dtype=torch.float64))
            self.register_buffer("empty", torch.empty(0))

        def forward(self, x):
            self.count += 2**33
            self.nan.zero_()
            self.gaps += 1
            self.flags.logical_not_()
            self.coarse *= 2
            self.fine += 1e-12
            return self.linear(x)

    def bits(model):
        return {name: b.contiguous().view(-1).view(torch.uint8).tolist() for name, b in model.named_buffers()}

    model = seeded(Kinds)
    opt = SharpnessAware(frozen(model), SAM(), model)
    (d,) = problems.steps(1)
    seen, after = [], None
    for look in opt.passes():
        seen.append(bits(model))
        problems.loss(model, d.main).backward()
        if look.index == 0:
            after = bits(model)
    assert seen[0] == seen[1] != after
    assert bits(model) == after


def test_modules_that_are_added_later_are_isolated_too():
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 10)))
    opt = SharpnessAware(frozen(model), SAM(), model)
    first, second = problems.steps(2)
    by_closure(opt, model, first)
    model.append(nn.BatchNorm1d(10, dtype=torch.float64))
    by_closure(opt, model, second)
    assert model[1].num_batches_tracked == 1


def test_dropout_masks_are_the_same_in_every_look_and_differ_between_steps():
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10)))
    masks = []
    model[1].register_forward_hook(lambda m, i, o: masks.append(o != 0))
    opt = SharpnessAware(frozen(model), steppe.GNAMFast(), model)
    for d in problems.steps(2):
        by_closure(opt, model, d)
    assert all(torch.equal(masks[0], m) for m in masks[1:4]) and not torch.equal(masks[0], masks[4])


def test_without_a_model_the_random_state_is_restored_too():
    model = seeded(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10)))
    first, second = losses_of_looks(SharpnessAware(frozen(model), SAM(rho=0.0)), model)
    assert first == second


def test_requires_grad_that_a_closure_changes_is_restored():
    model = seeded(problems.mlp)
    opt = SharpnessAware(frozen(model), SAM(), model)
    data = problems.steps(1)[0]
    for look in opt.passes():
        model[0].requires_grad_(False)
        problems.loss(model, data.main).backward()
        if look.index == 1:
            break
    assert all(p.requires_grad for p in model.parameters())


def test_plain_steps_of_every_cost_one_pass():
    model = seeded(problems.mlp)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    opt = SharpnessAware(frozen(model), steppe.Every(4, SAM()), model)
    for d in problems.steps(8):
        by_closure(opt, model, d)
    assert len(calls) == 8 + 2
    assert Plain().copies == 0


# On a GPU


@pytest.mark.cuda
@problems.each_variant()
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16", "float16"])
def test_every_method_on_a_gpu_follows_the_cpu(method, precision):
    """Steps on the GPU against float64 steps on the CPU, to the precision's tolerance."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    # Low precision: the gradient itself is known to a percent, differences of gradients to less.
    tolerance = {"float64": 1e-6, "float32": 2e-3, "bfloat16": 0.2, "float16": 0.1}[precision]
    torch.backends.cudnn.allow_tf32 = False
    reference = seeded(problems.mlp)
    model = seeded(problems.mlp, dtype=dtype).cuda()
    model.load_state_dict(reference.state_dict())
    start = problems.weights(reference)
    lr = 0.05
    ours = SharpnessAware(torch.optim.SGD(model.parameters(), lr=lr), method, model)
    theirs = SharpnessAware(torch.optim.SGD(reference.parameters(), lr=lr), method, reference)
    draw_on_cpu(ours)  # generators of the two devices give different numbers
    cast = torch.autocast("cuda", getattr(torch, precision), enabled=precision.endswith("float16"))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, enabled=precision == "float16")
    for d in problems.steps(3):
        gpu = problems.Data(*[(x.to("cuda", dtype), y.cuda()) for x, y in (d.main, d.auxiliary)])
        for look in ours.passes(scaler):
            with cast:
                loss = problems.loss(model, gpu.of(look.batch, look.sample))
            scaler.scale(loss).backward()
            look.report(loss)
        scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        by_closure(theirs, reference, d)
    moved = problems.weights(reference) - start
    error = problems.weights(model).cpu().double() - problems.weights(reference)
    noisy = isinstance(method, (steppe.FrobSAM, steppe.ProductSAM, steppe.UniversalSAM)) and precision != "float64"
    if noisy or ("lr" in method.needs and precision.endswith("float16")):
        assert torch.isfinite(error).all()  # loss differences over rho squared: rounding is all there is to see
    else:
        assert error.norm() <= tolerance * moved.norm()


def draw_on_cpu(opt):
    """Let an optimizer on the GPU draw what one on the CPU draws."""
    import steppe.optimizer as module

    class OnCPU(module.Draws):
        def _draw_like(self, p, sample):
            return super()._draw_like(p.detach().cpu().double(), sample).to(p.device, p.dtype)

    original = opt._context

    def context(space):
        ctx = original(space)
        ctx.draws = OnCPU(space, 0, opt.steps)
        return ctx

    opt._context = context


@pytest.mark.cuda
def test_dropout_masks_on_a_gpu():
    model = nn.Sequential(nn.Linear(64, 512), nn.Dropout(0.5), nn.Linear(512, 10)).cuda()
    masks = []
    model[1].register_forward_hook(lambda m, i, o: masks.append(o != 0))
    opt = SharpnessAware(frozen(model), steppe.CRSAM(), model)
    x, y = next(problems.batches(64, torch.float32))
    for _ in range(2):
        opt.step(lambda: F.cross_entropy(model(x.cuda()), y.cuda()))
    assert all(torch.equal(masks[0], m) for m in masks[1:3]) and not torch.equal(masks[0], masks[3])


@pytest.mark.cuda
def test_a_forward_that_seeds_the_gpu_leaves_its_own_seed_and_an_interrupted_step_the_old_one():
    model = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10)).cuda()
    x, y = (part.cuda() for part in next(problems.batches(64, torch.float32)))

    def loss():
        torch.cuda.manual_seed(7)
        return F.cross_entropy(model(x), y)

    torch.cuda.manual_seed(3)
    loss()
    once = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(3)
    torch.rand(5, device="cuda")
    before = torch.cuda.get_rng_state()
    opt = SharpnessAware(frozen(model), SAM(), model)
    opt.step(loss)
    assert torch.equal(torch.cuda.get_rng_state(), once)
    torch.cuda.set_rng_state(before)
    for look in opt.passes():
        loss().backward()
        if look.index == 1:
            break
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.cuda
def test_no_synchronisation_on_a_gpu():
    model = seeded(problems.convnet, dtype=torch.float32).cuda()
    x, y = next(problems.batches(32, torch.float32))
    x, y = x.cuda(), y.cuda()
    for method in problems.all_variants():
        if "lr" in method.needs:
            continue
        data = problems.Data((x, y), (x.flip(0), y.flip(0)))
        opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9), method, model)
        by_closure(opt, model, data)
        torch.cuda.set_sync_debug_mode("error")
        try:
            by_closure(opt, model, data)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("parametrization", ["symmetric", "weight_norm"])
def test_every_look_parametrizes_anew(parametrization):
    """`parametrize.cached()` around a step made SAM plain SGD, because all looks saw the first one's weights."""

    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).T

    model = problems.seeded(lambda: nn.Linear(3, 3).double())
    if parametrization == "symmetric":
        parametrize.register_parametrization(model, "weight", Symmetric())
    else:
        nn.utils.parametrizations.weight_norm(model)
    x = torch.randn(5, 3, dtype=torch.float64)
    directions = []
    for context in (contextlib.nullcontext, parametrize.cached):
        opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(0.3), model)
        with context():
            opt.gradient(lambda: model(x).pow(4).sum())
        directions.append(problems.flat(p.grad for p in model.parameters()))
        opt.zero_grad()
    assert torch.equal(*directions)


def test_parameters_of_others_may_be_replaced_and_added():
    """Their gradient is that of the first look, also if they are new since the last step."""
    model = problems.seeded(lambda: nn.ModuleList([nn.Linear(3, 3), nn.ParameterList([torch.ones(3)])]).double())
    ours, theirs = model
    assert isinstance(theirs, nn.ParameterList)
    x = torch.randn(5, 3, dtype=torch.float64)

    def loss():
        return (ours(x) * sum(theirs)).square().sum()

    opt = steppe.SharpnessAware(torch.optim.SGD(ours.parameters(), lr=0.01), steppe.SAM(0.3), model)
    opt.step(loss)
    theirs.append(nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64)))
    theirs[0] = nn.Parameter(torch.full((3,), 3.0, dtype=torch.float64))
    expected = torch.autograd.grad(loss(), list(theirs))
    model.zero_grad()
    opt.step(loss)
    for p, grad in zip(theirs, expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=0)
