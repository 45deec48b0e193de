"""The contract of every method in the registry, in every setting that it declares. A new method is tested too."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import steppe
from helpers import problems
from helpers.captured_steps import with_sgd_for_gamma
from helpers.problems import adamw, by_backward_closure, by_closure, by_passes, everything, same, seeded, sgd, weights
from steppe.engine.random_vectors import Draws
from steppe.method import one_by_one

AFTER_WEIGHTS = ("4.running_mean", "4.running_var")  # in `problems.batchnorm_dropout`
every_variant = problems.each_variant()
LIMITS = [pair for cls in steppe.Method.registry.values() for pair in cls.reduces_to()]


def looks_away_first(method):
    """Whether the first look of a step is not at w: the buffers after it are not those of plain training."""
    space = steppe.Space([torch.ones(2, 3)])
    ctx = steppe.Context(1, 0.1, space.live, Draws(space, seed=0, step=1), method.memory(space))
    return next(one_by_one(method.at(1, 0.1).looks(ctx))) != steppe.HERE


def make(method, build=problems.mlp, base=sgd, dtype=torch.float64, **settings):
    model = seeded(build, dtype=dtype)
    if "lr" in method.needs:
        base = lambda m: torch.optim.SGD(m.parameters(), lr=0.05)  # noqa: E731
    return model, steppe.SharpnessAware(base(model), method, model, **settings)


def train(method, how=by_closure, count=4, **settings):
    model, opt = make(method, **settings)
    for data in problems.steps(count):
        how(opt, model, data)
    return model, opt


@pytest.mark.parametrize(
    ("special", "general"), LIMITS, ids=[f"{i}-{a.name}-{b.name}" for i, (a, b) in enumerate(LIMITS)]
)
@pytest.mark.parametrize("build", [problems.mlp, problems.batchnorm_dropout])
def test_special_cases_equal_what_they_reduce_to_to_the_last_bit(special, general, build):
    a, b = train(special, build=build)[0], train(general, build=build)[0]
    assert same(everything(a), everything(b))


@pytest.mark.parametrize("build", [problems.mlp, problems.batchnorm_dropout])
def test_plain_is_the_base_optimizer_to_the_last_bit(build):
    end = everything(train(steppe.Plain(), build=build)[0])
    model = seeded(build)
    base = sgd(model)
    for data in problems.steps(4):
        base.zero_grad()
        problems.loss(model, data.main).backward()
        base.step()
    assert same(everything(model), end)


@every_variant
@pytest.mark.parametrize("build", [problems.mlp, problems.batchnorm_dropout])
def test_closures_and_passes_give_the_same_steps(method, build):
    ends = [everything(train(method, how, build=build)[0]) for how in (by_closure, by_backward_closure, by_passes)]
    assert same(ends[0], ends[1]) and same(ends[0], ends[2])


@every_variant
def test_micro_batches_add_up(method):
    """A list of closures, a loop in the closure, a loop in the passes body: all equal the whole batch."""
    reference, _ = train(method)

    def parts(data, batch, sample):
        x, y = data.of(batch, sample)
        return [(x, y)] if batch == "sample" else [(x[:10], y[:10]), (x[10:], y[10:])]

    def loss_of(model, data, part, batch, sample):
        return problems.loss(model, part) * len(part[0]) / len(data.of(batch, sample)[0])

    def listed(opt, model, data):
        batches = {
            name: [lambda p=p, b=b: loss_of(model, data, p, b, None) for p in parts(data, b, None)]
            for name, b in (("closure", "main"), ("auxiliary", "auxiliary"))
        }
        opt.step(**batches, sample=data.closures(model)["sample"])

    def looped(opt, model, data):
        for look in opt.passes():
            for part in parts(data, look.batch, look.sample):
                loss = loss_of(model, data, part, look.batch, look.sample)
                loss.backward()
                look.report(loss)
        opt.step()

    for how in (listed, looped):
        torch.testing.assert_close(weights(train(method, how)[0]), weights(reference), rtol=1e-7, atol=1e-9)


@every_variant
def test_a_framework_may_run_the_first_pass(method):
    """What trainers do: they run the first pass, the optimizer runs the others."""

    def framework(opt, model, data):
        opt.zero_grad()
        opt.begin()
        problems.loss(model, data.main).backward()
        opt.gradient(**data.closures(model), first_done=True)
        opt.step()

    if "loss" in method.needs or looks_away_first(method):
        model, opt = make(method)
        data = problems.steps(1)[0]
        problems.loss(model, data.main).backward()
        with pytest.raises(RuntimeError, match=r"needs the loss|does not look at the weights first"):
            opt.gradient(**data.closures(model), first_done=True)
        return
    build = problems.batchnorm_dropout
    assert same(everything(train(method, framework, build=build)[0]), everything(train(method, build=build)[0]))


@every_variant
def test_the_number_of_looks_is_the_declared_cost(method):
    calls = 0

    def counting(opt, model, data):
        nonlocal calls
        look = None
        for look in opt.passes():
            calls += 1
            loss = problems.loss(model, data.of(look.batch, look.sample))
            loss.backward()
            look.report(loss)
        opt.step()
        assert look is not None and opt.metrics["looks"] == look.index + 1

    train(method, counting, count=12)
    first = 1 if "lr" in method.needs else 0  # there is no step before the first to measure the smoothness of
    plain = method.start if isinstance(method, steppe.Late) else 0  # steps before its cost counts
    assert calls + first == pytest.approx((12 - plain) * method.cost + plain)


@every_variant
@pytest.mark.parametrize("base", [sgd, adamw])
def test_resume_is_bit_equal(method, base):
    straight, _ = train(method, count=6, build=problems.batchnorm_dropout, base=base)
    end = everything(straight)

    model, opt = make(method, build=problems.batchnorm_dropout, base=base)
    data = problems.steps(6)
    for d in data[:3]:
        by_closure(opt, model, d)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "rng": torch.get_rng_state()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh, opt = make(method, build=problems.batchnorm_dropout, base=base)
    fresh.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    torch.set_rng_state(saved["rng"])
    for d in data[3:]:
        by_closure(opt, fresh, d)
    assert same(everything(fresh), end)


@every_variant
def test_deep_copies_continue_with_the_same_bits(method):
    model, opt = train(method, count=3)
    twins = [copy.deepcopy((model, opt))]
    twins.append(pickle.loads(pickle.dumps((model, opt))))
    data = problems.steps(6)[3:]
    for d in data:
        by_closure(opt, model, d)
    for other, its_opt in twins:
        assert its_opt.base is not opt.base and repr(its_opt.method) == repr(method)
        for d in data:
            by_closure(its_opt, other, d)
        assert torch.equal(weights(other), weights(model))


@every_variant
def test_no_step_synchronises_with_the_device(method):
    """With fake tensors, reading a value raises. A step that reads none can be captured in a CUDA graph."""
    method = with_sgd_for_gamma(method)
    data = problems.steps(3, dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = problems.mlp()
        fused = "lr" in method.needs  # only a fused base takes a learning rate from the device
        base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0 if fused else 0.9, fused=fused)
        opt = steppe.SharpnessAware(base, method, model)
        for d in data:
            fake = problems.Data(*[(mode.from_tensor(x), mode.from_tensor(y)) for x, y in (d.main, d.auxiliary)])
            by_closure(opt, model, fake)
    assert opt.steps == 3


@every_variant
@pytest.mark.parametrize("what", [KeyboardInterrupt, RuntimeError, "break"])
def test_leaving_a_look_early_restores_everything(method, what):
    """In whichever look it happens: weights, buffers, modes, random state and memory are as before."""
    model, opt = train(method, count=1, build=problems.batchnorm_dropout)
    data = problems.steps(2)[1]
    opt.zero_grad()
    before, memory = everything(model), opt.state_dict()
    looks = round(max(m.cost for m in [method, getattr(method, "method", method)])) + 1
    for last in range(looks):
        left = False
        try:
            for look in opt.passes():
                loss = problems.loss(model, data.of(look.batch, look.sample))
                model.eval()
                if look.index == last:
                    left = True
                    if what == "break":
                        break
                    raise what
                model.train()
                loss.backward()
                look.report(loss)
        except (KeyboardInterrupt, RuntimeError):
            pass
        if not left:
            break
        assert model.training and all(m.training for m in model.modules())
        assert same(everything(model), before)
        assert all(p.grad is None for p in model.parameters())
        assert str(opt.state_dict()) == str(memory)
    else:
        return
    assert last >= 1  # at least one look was left


@every_variant
def test_an_unperturbed_group_never_moves(method):
    model = seeded(problems.mlp)
    free, still = [model[0].weight, model[2].bias], [model[0].bias, model[2].weight]
    base = torch.optim.SGD([{"params": free}, {"params": still, "perturb": False}], lr=0.05)
    opt = steppe.SharpnessAware(base, method, model)
    moved = False
    for data in problems.steps(3):
        before = [p.detach().clone() for p in (*free, *still)]
        for look in opt.passes():
            now = [torch.equal(a, b) for a, b in zip(before, (*free, *still), strict=True)]
            assert all(now[2:])
            moved |= not all(now[:2])
            loss = problems.loss(model, data.of(look.batch, look.sample))
            loss.backward()
            look.report(loss)
        opt.step()
    assert moved == (method.cost > 1 or looks_away_first(method))


@every_variant
def test_an_overflow_in_any_look_skips_the_step(method):
    """With the stock GradScaler loop: weights, memory and counters as before, and the scale halves."""
    model, opt = make(method, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    data = problems.steps(3, dtype=torch.float32)

    def step(d, overflow_at=None):
        opt.zero_grad()
        count = 0
        for look in opt.passes(scaler):
            count += 1
            loss = problems.loss(model, d.of(look.batch, look.sample))
            look.report(loss)
            scaler.scale(loss).backward()
            for p in model.parameters() if look.index == overflow_at else ():
                p.grad.mul_(torch.inf)
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        return count

    step(data[0])
    looks = step(data[1])
    for overflow_at in range(looks):
        before, memory, scale, steps = everything(model), str(opt.state_dict()), scaler.get_scale(), opt.steps
        if opt.metrics["looks"] <= overflow_at:
            break
        count = step(data[2], overflow_at)
        if count <= overflow_at:
            continue
        assert same(everything(model), before), f"look {overflow_at} of {count}"
        assert str(opt.state_dict()) == memory and opt.steps == steps
        assert scaler.get_scale() == scale / 2


@every_variant
def test_a_grad_scaler_does_not_change_the_steps(method):
    plain, _ = train(method, count=3)
    model, opt = make(method)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    for d in problems.steps(3):
        for look in opt.passes(scaler):
            loss = problems.loss(model, d.of(look.batch, look.sample))
            scaler.scale(loss).backward()
            look.report(loss)
        scaler.step(opt)
        scaler.update()
    assert torch.equal(weights(model), weights(plain))  # a power of two: exact
    for scaler in (torch.amp.GradScaler("cpu", init_scale=2.0**7), steppe.FixedScale("cpu", 2.0**7)):
        model, opt = make(method)
        for d in problems.steps(3):
            opt.gradient(**d.closures(model), scaler=scaler)
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        assert torch.equal(weights(model), weights(plain))


@every_variant
def test_buffers_and_random_state_are_those_of_plain_training(method):
    """lr = 0 keeps the weights, so that the first pass of every step is the same as the base's."""
    if "lr" in method.needs:
        pytest.skip("sets its own learning rate")
    frozen = lambda m: torch.optim.SGD(m.parameters(), lr=0.0)  # noqa: E731
    model, _ = train(method, build=problems.batchnorm_dropout, base=frozen)
    end = everything(model)
    plain, _ = train(steppe.Plain(), build=problems.batchnorm_dropout, base=frozen)
    if looks_away_first(method):  # then the second BatchNorm sees other inputs
        keys = [*plain.state_dict(), "random state"]
        expected = everything(plain)
        assert all(torch.equal(a, b) for k, a, b in zip(keys, end, expected, strict=True) if k not in AFTER_WEIGHTS)
        return
    assert same(end, everything(plain))


@every_variant
def test_a_parameter_without_gradient_is_left_alone(method):
    """Unused in every look: no gradient, no decay. Used in some steps only: no stale perturbation."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.sometimes, self.never = (
                torch.nn.Linear(64, 10),
                torch.nn.Linear(10, 10),
                torch.nn.Linear(3, 3),
            )
            self.now = True

        def forward(self, x):
            x = self.used(x)
            return self.sometimes(x) if self.now else x

    model, opt = make(method, build=Net)
    never = [p.detach().clone() for p in model.never.parameters()]
    for i, data in enumerate(problems.steps(4)):
        model.now = i % 2 == 0
        before = model.sometimes.weight.detach().clone()
        by_closure(opt, model, data)
        assert (model.sometimes.weight.grad is None) == (not model.now)
        if not model.now:
            assert torch.equal(before, model.sometimes.weight)
    assert all(torch.equal(a, b) for a, b in zip(never, model.never.parameters(), strict=True))
    assert model.never.weight.grad is None


@problems.each_method(unmarked=("SAM", "GSAM", "GAM"))
def test_a_compiled_model_gives_equal_steps_and_compiles_once(method):
    if "sample" in method.needs:
        pytest.skip("a single example is another shape, and another mode of batch norm")
    torch._dynamo.reset()
    from torch._dynamo.utils import counters

    counters.clear()
    eager, _ = train(method, build=problems.convnet)
    model, opt = make(method, build=problems.convnet)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    opt.model = compiled
    with torch._dynamo.config.patch(error_on_recompile=True):
        for data in problems.steps(4):
            opt.step(**data.closures(compiled))
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(weights(model), weights(eager), rtol=1e-9, atol=1e-11)


@every_variant
def test_the_method_may_be_changed_during_training(method):
    """Its memory is then made, as in a copy of the optimizer that gets the method before its first step."""
    plain = (lambda m: torch.optim.SGD(m.parameters(), lr=0.05)) if "lr" in method.needs else sgd
    model, opt = train(steppe.SAM(), count=2, base=plain)
    other, fresh = copy.deepcopy((model, opt))
    opt.method = fresh.method = method
    for data in problems.steps(3):
        by_closure(opt, model, data)
        by_closure(fresh, other, data)
    assert torch.equal(weights(model), weights(other))
