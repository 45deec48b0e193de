"""What the optimizer and the methods refuse, and what they say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import steppe
from helpers import problems
from helpers.optimizers import make, run
from helpers.problems import everything, same, seeded, sgd, weights
from steppe import SAM, SharpnessAware


@pytest.mark.parametrize("rho", [-0.1, float("nan"), float("inf"), "0.1", True])
def test_a_radius_must_be_a_number(rho):
    with pytest.raises(ValueError, match="SAM: rho must"):
        SAM(rho=rho)
    model = seeded(problems.mlp)
    if rho is not True:
        with pytest.raises(ValueError, match="group's rho"):
            SharpnessAware(torch.optim.SGD([{"params": model.parameters(), "rho": rho}], lr=0.1), SAM())


def test_the_value_of_a_schedule_is_checked():
    model, opt = make(SAM(rho=lambda step, lr: -1.0))
    with pytest.raises(ValueError, match="rho must not be negative"):
        run(model, opt, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m: SharpnessAware(torch.optim.LBFGS(m.parameters()), SAM()), "LBFGS cannot be the base"),
        (lambda m: SharpnessAware(torch.optim.SGD, SAM()), "build it first"),  # pyright: ignore[reportArgumentType]
        (lambda m: SharpnessAware(sgd(m), "sam"), "use steppe.wrap"),  # pyright: ignore[reportArgumentType]
        (lambda m: SharpnessAware(sgd(m), SAM(), model=m.parameters()), "model must be the module that is trained"),
        (lambda m: SharpnessAware(SharpnessAware(sgd(m), SAM()), SAM()), "SharpnessAware cannot be the base"),
        (lambda m: SharpnessAware(sgd(nn.ParameterList([torch.ones(2, dtype=torch.cfloat)])), SAM()), "complex"),
    ],
)
def test_what_cannot_be_wrapped(wrong, message):
    with pytest.raises(TypeError, match=message):
        wrong(seeded(problems.mlp))


def test_local_needs_ddp_and_hvp_a_known_name():
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        make(local=True)
    with pytest.raises(ValueError, match="hvp must be"):
        make(hvp="magic")


def test_step_needs_a_direction():
    model, opt = make()
    with pytest.raises(RuntimeError, match=r"step\(\) needs a direction"):
        opt.step()
    problems.loss(model, problems.steps(1)[0].main).backward()
    with pytest.raises(RuntimeError, match=r"step\(\) needs a direction"):
        opt.step()  # the defect: silently the base's step


@pytest.mark.parametrize(
    ("closure", "error", "message"),
    [
        (lambda: None, TypeError, "it returned None"),
        (lambda: 1.5, TypeError, "it returned 1.5"),
        (lambda: torch.ones(3, requires_grad=True), TypeError, r"shape \(3,\)"),
        (lambda: torch.tensor(1.0), RuntimeError, "has no autograd graph"),
        (lambda: torch.tensor(float("nan")), RuntimeError, "has no autograd graph"),
        ([], ValueError, "list of closures is empty"),
        (torch.tensor(1.0), TypeError, "a function that returns the loss, not the loss"),
    ],
)
def test_what_a_closure_must_return(closure, error, message):
    model, opt = make()
    before = everything(model)
    with pytest.raises(error, match=message):
        opt.step(closure)
    assert same(everything(model), before)


def test_gradients_of_an_unfinished_accumulation_are_not_dropped():
    model, opt = make()
    first, second = problems.steps(2)
    problems.loss(model, first.main).backward()
    with pytest.raises(RuntimeError, match="gradients that no step has used"):
        opt.step(**second.closures(model))
    with pytest.raises(RuntimeError, match="gradients that no step has used"):
        opt.passes()
    opt.zero_grad()
    opt.step(**second.closures(model))
    problems.loss(model, first.main).backward()  # on top of the last step's: not used either
    with pytest.raises(RuntimeError, match="gradients that no step has used"):
        opt.step(**second.closures(model))


def test_first_done_needs_a_gradient():
    model, opt = make()
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.gradient(**problems.steps(1)[0].closures(model), first_done=True)


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(3, 1))
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), model)
    with pytest.raises(TypeError, match="sparse gradients"):
        opt.step(lambda: model(torch.tensor([[1], [2]])).sum())


def test_parameters_may_not_change_between_the_looks_and_the_step():
    model, opt = make()
    opt.gradient(**problems.steps(1)[0].closures(model))
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    with pytest.raises(RuntimeError, match="parameters changed"):
        opt.step()


def test_nothing_to_train():
    model, opt = make()
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="no parameter that requires a gradient"):
        opt.step(lambda: torch.tensor(1.0))


def test_missing_batches_and_losses_are_asked_for():
    model, opt = make(steppe.GAM())
    data = problems.steps(1)[0]
    with pytest.raises(RuntimeError, match="GAM looks at a batch called 'auxiliary'"):
        opt.step(data.closures(model)["closure"])
    model, opt = make(steppe.SSAM())
    with pytest.raises(RuntimeError, match="SSAM looks at a batch called 'sample'"):
        opt.step(data.closures(model)["closure"])
    model, opt = make(steppe.TraceSAM())
    loop = opt.passes()
    next(loop)
    problems.loss(model, data.main).backward()
    with pytest.raises(RuntimeError, match=r"TraceSAM needs the loss of every look: call look.report"):
        next(loop)


@pytest.mark.parametrize(("method", "batch"), [(steppe.GAM(T=1), "auxiliary"), (steppe.SSAM(), "sample")])
def test_a_loop_that_ignores_which_batch_a_look_is_on_is_refused(method, batch):
    """It would take the main batch for it: no gap, no single example, and no error."""
    model, opt = make(method)
    before, data = everything(model), problems.steps(1)[0]

    def loop() -> None:
        for look in opt.passes():
            value = problems.loss(model, data.main)
            value.backward()
            look.report(value)

    with pytest.raises(RuntimeError, match=rf"a batch called '{batch}': in a loop over passes\(\), use that one where"):
        loop()
    assert same(everything(model), before)


def test_a_method_that_sets_the_learning_rate_refuses_a_scheduler():
    model, opt = make(steppe.SASAM(), base=lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    schedulers.ExponentialLR(opt, 0.9)
    with pytest.raises(RuntimeError, match="SASAM sets the learning rate itself"):
        run(model, opt, 1)
    model, opt = make(steppe.SASAM(), base=lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    run(model, opt, 1)
    opt.param_groups[0]["lr"] = 0.01
    with pytest.raises(RuntimeError, match="SASAM sets the learning rate itself"):
        run(model, opt, 1)


def test_a_method_that_sets_the_learning_rate_sets_one_for_all_groups():
    model = seeded(problems.mlp)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-4}]
    opt = SharpnessAware(torch.optim.SGD(groups, lr=0.05), steppe.SASAM(), model)
    before = weights(model)
    with pytest.raises(RuntimeError, match="SASAM sets one learning rate for all weights"):
        run(model, opt, 1)
    assert torch.equal(weights(model), before) and [g["lr"] for g in opt.param_groups] == [0.05, 1e-4]
    opt.param_groups[1]["lr"] = 0.05
    run(model, opt, 2)
    assert opt.param_groups[0]["lr"] == opt.param_groups[1]["lr"] != 0.05


def test_a_group_added_later_takes_the_learning_rate_of_a_method_that_sets_it():
    """Also right after a resume; but not that of a method which is there no more."""
    base = lambda m: torch.optim.SGD(m[2].parameters(), lr=0.05)  # noqa: E731
    model, opt = make(steppe.SASAM(), base=base)
    run(model, opt, 3)
    saved = opt.state_dict()
    opt.method = SAM()
    opt.add_param_group({"params": [model[0].bias], "lr": 0.3})
    assert opt.param_groups[1]["lr"] == 0.3
    model, opt = make(steppe.SASAM(), base=base)
    opt.load_state_dict(saved)
    opt.add_param_group({"params": model[0].parameters()})
    assert opt.param_groups[1]["lr"] == opt.param_groups[0]["lr"] != 0.05
    run(model, opt, 1)


@pytest.mark.parametrize(
    ("make_method", "message"),
    [
        (lambda: steppe.FrobSAM(n=1), "n must be at least 2"),
        (lambda: steppe.GAM(T=0), "T must be"),
        (lambda: steppe.GAM(eps=0.0), "eps must be positive"),
        (lambda: steppe.GAM(eps=-1.0), "eps must be positive"),
        (lambda: steppe.GAM(gamma=(0.1,)), "1 fixed coefficients"),
        (lambda: steppe.GAM(discrepancy="manhattan"), "discrepancy must be"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.GAM(period=0), "period must be"),
        (lambda: steppe.Every(0, SAM()), "k must be"),
        (lambda: steppe.Every(2, "sam"), "needs a method"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.GSAM(objective="x"), "objective must be"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.GSAM(ascent="x"), "ascent must be"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.GNAMFast(weighting="x"), "weighting must be"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.LookSAM(k=0), "k must be"),
        (lambda: steppe.WSAM(gamma=1.0), "gamma must be"),
        (lambda: steppe.SSAM(sparsity=1.0), "sparsity must be"),
        (lambda: steppe.SSAM(rule="x"), "rule must be"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.SSAM(samples=0), "at least 1"),
        (lambda: steppe.SSAM(samples=2.5), "samples must be a whole number"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.SSAM(every=2.5), "every must be a whole number"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.SSAM(rule="dynamic", total=0), "total must be a whole number"),
        (lambda: steppe.SSAM(rule="dynamic", drop=1.5), "drop is a share"),
        (lambda: steppe.SSAM(sparsity=lambda step, lr: 0.5), "sparsity must be a number"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.GNAM(oracle="sam"), "oracle must be a method"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.GNAM(oracle=SAM), "oracle must be a method"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.GAM(T=1, gamma=0.1), "must be finite numbers, T of them"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.GAM(gamma=(0.1, math.nan)), "must be finite numbers"),
        (lambda: steppe.GAM(gamma=("a", "b")), "must be finite numbers"),  # pyright: ignore[reportArgumentType]
        (lambda: steppe.DetSAM(half_width=math.nan), "half_width must be a finite number"),
        (lambda: steppe.TraceSAM(n=0), "n must be"),
        (lambda: steppe.TraceSAM(rho=0.0), "rho must be positive"),
        (lambda: steppe.EntropySGD(L=-1), "L must be"),
        (lambda: steppe.linear_in_lr(0.1, 0.2, 1.0), "rho_min <= rho_max"),
        (lambda: steppe.UniversalSAM(mu=(steppe.methods.universal.normal,) * 2), "one sampler mu"),
    ],
)
def test_methods_refuse_what_makes_no_sense(make_method, message):
    with pytest.raises(ValueError, match=message):
        make_method()


def test_a_checkpoint_is_refused_for_what_a_group_is_refused_for():
    """And the optimizer stays as it was."""
    model, opt = make()
    run(model, opt, 2)
    for key, value, message in (("maximize", True, "maximize=True is not supported"), ("rho", -1.0, "group's rho")):
        wrong = opt.state_dict()
        wrong["param_groups"] = [{**wrong["param_groups"][0], key: value, "lr": 7.0}]
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(wrong)
        assert opt.steps == 2 and opt.param_groups[0]["lr"] == 0.1
        assert "rho" not in opt.param_groups[0] and not opt.param_groups[0]["maximize"]
    other, its_opt = make()
    run(other, its_opt, 4)
    assert torch.equal(run(model, opt, 2, start=2), weights(other))


def test_a_group_s_radius_is_a_number_that_may_change():
    model, opt = make()
    opt.param_groups[0]["rho"] = lambda step, lr: 0.1
    with pytest.raises(ValueError, match="give a schedule to the method"):
        run(model, opt, 1)
    ends = []
    for rho in (0.25, np.float32(0.25), torch.tensor(0.25, dtype=torch.float64)):
        model, opt = make()
        opt.param_groups[0]["rho"] = rho
        ends.append(run(model, opt, 2))
    assert same(ends[1:], [ends[0]] * 2)


@pytest.mark.parametrize("hvp", ["forward", "exact"])
def test_a_loss_from_outside_of_the_closure(hvp):
    model, opt = make(steppe.CRSAM() if hvp == "forward" else steppe.GNAM(), hvp=hvp)
    before, loss = everything(model), problems.loss(model, problems.steps(1)[0].main)
    with pytest.raises(RuntimeError, match="the closure must compute the loss anew"):
        opt.step(lambda: loss)
    assert same(everything(model), before)


def test_micro_batches_that_share_a_graph():
    model, opt = make()
    inputs, targets = problems.steps(1)[0].main
    hidden = model[:2](inputs)
    parts = [lambda i=i: nn.functional.cross_entropy(model[2](hidden), targets) * i for i in (1, 2)]
    with pytest.raises(RuntimeError, match="all call backward, or none of them"):
        opt.step(parts)


class NoLR(torch.optim.Optimizer):
    """A base without a learning rate."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (steppe.SAM(rho=steppe.linear_in_lr(0.2, 0.1, 1.0)), "linear_in_lr follows the learning rate"),
        (steppe.WSAM(), "has no learning rate, by which this method steps"),
        (steppe.SASAM(), "SASAM sets the learning rate, but the base optimizer has none"),
    ],
    ids=["schedule", "wsam", "sasam"],
)
def test_a_base_without_a_learning_rate(method, message):
    model, opt = make(method, base=lambda m: NoLR(m.parameters()))
    before = weights(model)
    with pytest.raises(RuntimeError, match=message):
        run(model, opt, 1)
    assert torch.equal(weights(model), before)


def test_whole_numbers_of_numpy_and_no_booleans():
    three: Any = np.int64(3)
    method = steppe.LookSAM(k=three)
    assert method == steppe.LookSAM(k=3) and type(method.k) is int
    assert steppe.Averaging(nn.Linear(1, 1), swa_from=three)._start == 3
    with pytest.raises(ValueError, match="k must be a whole number"):
        steppe.LookSAM(k=True)
    rate = steppe.linear_in_lr(0.5, 0.25, 1.0)(0, np.float32(0.5))
    assert rate == 0.375 and type(rate) is float


def test_settings_may_be_numbers_of_numpy():
    half: Any = np.float32(0.5)
    method = steppe.SAM(rho=half)
    assert method == steppe.SAM(rho=0.5) and type(method.rho) is float
    three: Any = np.int64(3)
    late = steppe.Late(method, start=three)
    assert late.start == 3 and type(late.start) is int
    yes: Any = np.True_
    with pytest.raises(ValueError, match="rho must be a finite number"):
        steppe.SAM(rho=yes)
