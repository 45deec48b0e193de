"""Cases that papers do not mention: zero gradients, unperturbed groups, a change of method, other optimizers for γ."""

from __future__ import annotations

from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, RAdam, RMSprop, Rprop
from torch.utils.data import DataLoader, Dataset

import steppe
from steppe import GAM, GNAM, SAM, SASAM, SASGD, SSAM, EntropySGD, GNAMFast, LookSAM, SharpnessAware, TraceSAM
from steppe.engine.looks import Products
from steppe.methods.universal import UniversalSAM, steepest

DOUBLE = torch.float64


def weights(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=DOUBLE))


def quartic(p: Tensor) -> Tensor:
    return (p**4).sum()


# SA-SAM


@pytest.mark.parametrize("method", [SASAM(), SASGD(), SASAM(published=True)], ids=["sam", "sgd", "published"])
@pytest.mark.parametrize("without", [0, 1, 2])
def test_a_step_without_a_gradient_leaves_sa_sam_as_it_is(method, without):
    """Nothing bounds the learning rate in the first two, so it stays; later, or as published, it grows as usual."""
    p = weights(0.7, -0.4)
    opt = SharpnessAware(SGD([p], lr=0.01), method)
    for step in range(6):
        before = float(opt.param_groups[0]["lr"])
        opt.step(lambda step=step: quartic(p) * (step != without))
        lr = float(opt.param_groups[0]["lr"])
        if step == without:
            assert lr == before if without < 2 and not method.published else before < lr < 1.5 * before
        assert 0.005 < lr < 1 and p.abs().max() < 1


def test_sa_sam_ignores_a_step_without_a_gradient():
    def path(factors: list[float]) -> list[float]:
        p = weights(0.7, -0.4)
        opt = SharpnessAware(SGD([p], lr=0.01), SASAM())
        for factor in factors:
            opt.step(lambda factor=factor: factor * quartic(p))
        return [*p.tolist(), float(opt.param_groups[0]["lr"])]

    assert path([0.0, 1.0, 1.0, 1.0]) == path([1.0, 1.0, 1.0])


@pytest.mark.parametrize("zero", [0.0, torch.zeros((), dtype=DOUBLE)], ids=["number", "tensor"])
def test_delta_zero_never_lets_the_learning_rate_grow(zero):
    """Also as a tensor, which it is in a recorded step that a schedule gives it to: 0 · ∞ is not a number."""
    p = weights(0.7, -0.4)
    opt = SharpnessAware(SGD([p], lr=1e-3), SASAM(delta=lambda step, lr: zero))
    for _ in range(4):
        opt.step(lambda: quartic(p))
        assert float(opt.param_groups[0]["lr"]) == 1e-3


@pytest.mark.parametrize("method", [SASAM(), SASGD(), SASAM(published=True)], ids=["sam", "sgd", "published"])
def test_sa_sam_that_follows_another_method_starts_as_if_it_were_first(method):
    def later(opt: SharpnessAware, p: nn.Parameter) -> list[float]:
        for _ in range(4):
            opt.step(lambda: quartic(p))
        return [*p.tolist(), float(opt.param_groups[0]["lr"])]

    p = weights(0.7, -0.4)
    opt = SharpnessAware(SGD([p], lr=0.01), SAM())
    opt.step(lambda: quartic(p))
    q = weights(*p.tolist())
    opt.method = method
    assert later(opt, p) == later(SharpnessAware(SGD([q], lr=0.01), method), q)


def test_a_parameter_that_is_unfrozen_has_not_moved_before():
    p, late = weights(0.5), weights(5.0)
    late.requires_grad_(False)
    opt = SharpnessAware(SGD([p, late], lr=0.01), SASAM())
    seen: list[float] = []

    def closure() -> Tensor:
        seen.append(late.item())
        return quartic(p) + 1e-3 * quartic(late)

    for step in range(3):
        late.requires_grad_(step == 2)
        seen.clear()
        opt.step(closure)
    assert len(seen) == 3 and min(seen) > 4.8  # at w, at the last weights, at the perturbed ones: never at zero


def test_what_another_method_remembers_of_some_parameters_does_not_matter():
    p, late = weights(0.5), weights(0.3)
    late.requires_grad_(False)
    opt = SharpnessAware(SGD([p, late], lr=0.01), LookSAM(k=2))
    opt.step(lambda: quartic(p) + quartic(late))
    other = SharpnessAware(SGD([p, late.requires_grad_()], lr=0.01), SAM())
    other.load_state_dict(opt.state_dict())
    other.step(lambda: quartic(p) + quartic(late))
    assert other.steps == 2


# SSAM


def kept(opt: SharpnessAware) -> int:
    return sum(int(opt.state[p]["steppe.mask"].sum()) for group in opt.param_groups for p in group["params"])


def test_a_dynamic_mask_keeps_its_share_where_gradients_are_zero():
    p = nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    opt = SharpnessAware(SGD([p], lr=1e-3), SSAM(rule="dynamic", every=1))
    for _ in range(4):
        opt.step(lambda: (p[:100] ** 2).sum())
        assert kept(opt) == 500


@pytest.mark.parametrize(("size", "sparsity", "count"), [(10, 0.9, 1), (100, 0.9, 10), (1000, 0.3, 700), (5, 0.5, 2)])
def test_how_many_weights_are_kept(size, sparsity, count):
    p = nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(0)))
    opt = SharpnessAware(SGD([p], lr=0.1), SSAM(rule="dynamic", sparsity=sparsity))
    opt.step(lambda: (p**2).sum())
    assert kept(opt) == count


def test_a_mask_compares_numbers_of_different_precision():
    single, double = nn.Parameter(torch.linspace(1, 2, 10)), nn.Parameter(torch.linspace(1, 2, 10, dtype=DOUBLE))
    opt = SharpnessAware(SGD([double, single], lr=1e-3), SSAM(samples=1))

    def closure() -> Tensor:
        return (single.double() ** 2).sum() + (double**2).sum()

    opt.step(closure, sample=lambda i: closure())
    for p in (single, double):
        assert opt.state[p]["steppe.mask"].tolist() == [0.0] * 5 + [1.0] * 5


# Groups


def test_entropy_sgd_trains_weights_that_it_does_not_perturb():
    """In a linear loss the place does not matter: both groups step alike."""
    p, still = weights(0.5, 0.2), weights(0.5, 0.2)
    slope = torch.tensor([1.0, -2.0], dtype=DOUBLE)
    groups = [{"params": [p]}, {"params": [still], "perturb": False}]
    opt = SharpnessAware(SGD(groups, lr=1.0), EntropySGD(eps=0.0))

    def closure() -> Tensor:
        assert still.tolist() == [0.5, 0.2]
        return slope @ p + slope @ still

    opt.step(closure, auxiliary=closure)
    assert p.tolist() == still.tolist() != [0.5, 0.2]


@pytest.mark.parametrize("discrepancy", ["dot", "squared"])
def test_gams_slope_is_the_same_however_products_are_made_when_a_group_stays(discrepancy):
    def slope(hvp: Products) -> Tensor:
        p, still = weights(0.5, -0.2, 0.9), weights(0.3, 0.7)
        groups = [{"params": [p]}, {"params": [still], "perturb": False}]
        opt = SharpnessAware(SGD(groups, lr=0.1), GAM(discrepancy=discrepancy), hvp=hvp)
        opt.step(lambda: loss(p, still, 1.0), auxiliary=lambda: loss(p, still, 2.0))
        return opt.metrics["slope"]

    def loss(p: Tensor, still: Tensor, factor: float) -> Tensor:
        return factor * ((p.sum() * still) ** 2).sum() + quartic(p) + (still**2).sum()

    torch.testing.assert_close(slope("central"), slope("exact"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", [TraceSAM(), steppe.LESAM(), steppe.GapSAM(), steppe.GAM()], ids=lambda m: m.name)
def test_a_groups_rho_is_refused_by_methods_that_would_ignore_it(method):
    p = weights(0.5)
    opt = SharpnessAware(SGD([{"params": [p], "rho": 3.0}], lr=0.1), method)
    for wrapped in (method, steppe.Every(2, method)):
        opt.method = wrapped
        with pytest.raises(ValueError, match=f"{method.name} has no radius that a parameter group could override"):
            opt.step(lambda: quartic(p), auxiliary=lambda: quartic(p))
    assert p.tolist() == [0.5]
    opt.method = steppe.Plain()  # has no settings: a baseline with the same groups
    opt.step(lambda: quartic(p))


@pytest.mark.parametrize("method", [SAM(rho=0.1), TraceSAM(rho=0.1)], ids=lambda m: m.name)
def test_adadelta_s_rho_is_not_taken_for_a_radius(method):
    ends = []
    for make in (Adadelta, SGD):
        w = weights(0.5, 0.7)
        opt = SharpnessAware(make([w], lr=0.1), method)
        opt.gradient(partial(quartic, w))
        ends.append(w.grad)
    assert torch.equal(ends[0], ends[1])


def test_adadeltas_rho_is_loaded_from_its_checkpoint():
    w = weights(0.5)
    opt = SharpnessAware(Adadelta([w]), SAM())
    opt.load_state_dict(Adadelta([w], rho=0.5).state_dict())
    assert opt.param_groups[0]["rho"] == 0.5


def test_a_checkpoint_of_the_plain_base_leaves_what_groups_ask_for():
    p, still = weights(0.5), weights(0.3)
    plain = SGD([{"params": [p]}, {"params": [still]}], lr=0.7).state_dict()
    groups = [{"params": [p], "rho": 0.3}, {"params": [still], "perturb": False}]
    opt = SharpnessAware(SGD(groups, lr=0.1), SAM(), seed=5)
    opt.load_state_dict(plain)
    first, second = opt.param_groups
    assert (first["lr"], first["rho"], first["steppe_seed"], second["perturb"]) == (0.7, 0.3, 5, False)
    saved = opt.state_dict()
    del saved["param_groups"][0]["rho"]  # one of ours says all there is to say
    opt.load_state_dict(saved)
    assert "rho" not in opt.param_groups[0] and opt.param_groups[1]["perturb"] is False


# GAM's γ


@pytest.mark.parametrize(
    "make",
    [
        partial(Adam, lr=1e-3), partial(Rprop, lr=1e-3), partial(NAdam, lr=1e-3), partial(ASGD, lr=1e-3),
        partial(Adagrad, lr=1e-3, initial_accumulator_value=0.1), partial(Adamax, lr=1e-3), partial(RAdam, lr=1e-3),
        partial(RMSprop, lr=1e-3, momentum=0.9), partial(SGD, lr=1e-3, momentum=0.9), partial(SGD, lr=1e-3),
        partial(SGD, lr=1e-3, momentum=0.9, dampening=0.5),
    ],
    ids=lambda make: make.func.__name__,
)  # fmt: skip
def test_gamma_moves_as_its_optimizer_would_move_it(make):
    p, gamma = weights(0.3, -0.2), nn.Parameter(torch.zeros(2, dtype=DOUBLE))
    opt, own = SharpnessAware(SGD([p], lr=1e-3), GAM(optimizer=make)), make([gamma])
    for _ in range(4):
        opt.step(lambda: quartic(p), auxiliary=lambda: 2 * quartic(p))
        gamma.grad = opt.metrics["slope"].clone()
        own.step()
        assert torch.equal(opt.metrics["gamma"], gamma)


# A class of one


def test_a_list_of_one_sampler_is_one_sampler():
    w = torch.tensor([0.5, -0.2], dtype=DOUBLE)
    one, listed = (
        steppe.drive(UniversalSAM(psi=torch.sin, mu=mu, rho=0.3), lambda w: w, w, loss=lambda w: w @ w / 2)
        for mu in (steepest, [steepest])
    )
    assert torch.equal(one, listed) and not torch.equal(one, w)


# Programs, looks that are parallel, loaders


def test_gnam_has_the_phases_of_its_oracle():
    for oracle in (LookSAM(k=3), GAM(period=2), SASAM(), SAM()):
        assert [GNAM(oracle=oracle).phase(step) for step in range(7)] == [oracle.phase(step) for step in range(7)]
    assert GNAM().phase(0) == 0


@pytest.mark.parametrize(("weighting", "of_g0", "of_g2"), [("paper", 1.5, -0.5), ("published", 1.0, 0.5)])
def test_gnamfast_with_a_beta_above_one(weighting, of_g0, of_g2):
    """In the paper's h₋ the weights of g₀ and g₂ sum to one; only published code takes an absolute value."""
    seen = [g0, g1, g2, g3] = torch.tensor([[1, 2, 3], [2, 1, 3], [3, 2, 4], [1, 1, 5]], dtype=DOUBLE)
    method = GNAMFast(alpha=0.3, beta=1.5, gamma=0.5, weighting=weighting)
    h_plus, h_minus = 0.3 * g1 + 0.7 * g3, of_g0 * g0 + of_g2 * g2
    expected = h_plus - 0.5 * (h_minus - (h_minus @ h_plus) / (h_plus @ h_plus) * h_plus)
    looks = iter(seen)
    torch.testing.assert_close(steppe.drive(method, lambda w: next(looks), g0), expected, rtol=1e-14, atol=1e-14)


def test_looksam_does_not_take_rounding_for_a_direction():
    p = nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    opt = SharpnessAware(SGD([p], lr=1e-3), LookSAM(k=3, rho=0.0))
    for _ in range(3):
        plain = 4 * p.detach() ** 3
        opt.step(lambda: quartic(p))
        torch.testing.assert_close(p.grad, plain, rtol=1e-5, atol=0)


class OneIterator:
    """Like a DataLoader with persistent workers: iterating again restarts its only iterator."""

    def __init__(self):
        self.iterator = iter(())

    def __iter__(self):
        return self.iterator


@pytest.mark.parametrize("choose", ["fresh", "fixed"])
def test_a_loader_with_one_iterator_has_no_second_pass(choose):
    for loader in (iter("abc"), OneIterator()):
        with pytest.raises(ValueError, match="cannot be iterated twice at the same time"):
            list(steppe.with_auxiliary(loader, choose))
    loader = DataLoader(cast(Dataset, [1, 2, 3]))  # a list has what a map-style dataset needs
    whole = [(a.item(), b.item()) for a, b in steppe.with_auxiliary(loader, choose)]
    assert [a for a, _ in whole] == [1, 2, 3]


@pytest.mark.parametrize("choose", ["fresh", "fixed", "previous"])
def test_a_loader_without_batches_has_no_pairs(choose):
    assert list(steppe.with_auxiliary([], choose)) == []


# Micro-batches


def by_itself(loss):
    """A closure that calls backward itself."""

    def closure() -> Tensor:
        value = loss()
        if value.requires_grad:
            value.backward()
        return value

    return closure


@pytest.mark.parametrize("first", ["another's", "constant", "ours"])
@pytest.mark.parametrize("backward", [True, False])
def test_a_micro_batch_that_reaches_no_parameter_of_the_optimizer(first, backward):
    """A branch of the model that is another optimizer's, or none: the others are trained all the same."""
    p, others = weights(0.7, -0.4), weights(0.3)

    def branch() -> Tensor:
        return {"another's": quartic(others), "constant": torch.ones((), dtype=DOUBLE), "ours": quartic(p)}[first]

    def rest() -> Tensor:
        return 2 * quartic(p)

    opt = SharpnessAware(SGD([p], lr=0.1), SAM(rho=0.1), nn.ParameterList([p, others]))
    closures = [by_itself(part) if backward else part for part in (branch, rest)]
    if first == "constant" and not backward:
        with pytest.raises(RuntimeError, match="has no autograd graph"):
            opt.gradient(closures)
        return
    loss = opt.gradient(closures)
    factor = 3 if first == "ours" else 2
    start = torch.tensor([0.7, -0.4], dtype=DOUBLE)
    slope = start**3 / (start**3).norm()
    assert loss is not None and p.grad is not None
    torch.testing.assert_close(loss, rest().detach() + branch().detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(p.grad, 4 * factor * (start + 0.1 * slope) ** 3, rtol=1e-11, atol=0)
    if first == "another's":
        assert others.grad is not None
        torch.testing.assert_close(others.grad, 4 * others.detach() ** 3, rtol=1e-14, atol=0)


def test_micro_batches_of_which_none_reaches_a_parameter():
    p, others = weights(0.7, -0.4), weights(0.3)
    opt = SharpnessAware(SGD([p], lr=0.1), SAM())

    def closure() -> Tensor:
        loss = quartic(others)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="its loss reaches no parameter of this optimizer"):
        opt.step([closure, closure])
