"""Hessian-vector products by difference, against exact ones in float64, on nets and digits."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import steppe
from helpers import problems
from steppe.engine.finite_difference import STEP, by_difference
from steppe.engine.looks import Products
from steppe.method import HERE, HVP, Look, Method, Seen
from steppe.vector import Vector


class Attention(nn.Module):
    """One block over the eight rows of a digit."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x.view(-1, 8, 8))
        q, k, v = self.qkv(self.norm(rows)).view(-1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 8, 16)
        return self.head((rows + self.out(mixed)).mean(1))


def mlp(activation: type[nn.Module], width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), activation(), nn.Linear(width, 10))


NETS: dict[str, Callable[[], nn.Module]] = {
    "softplus": lambda: mlp(nn.Softplus),
    "gelu": lambda: mlp(nn.GELU),
    "attention": Attention,
}
# The largest relative errors, for (forward, central): about 1.5 times what was measured over these nets.
TOLERANCE = {
    "float64": (2e-7, 5e-10),
    "float32": (4e-3, 3e-4),
    "float16": (0.15, 0.05),
    "bfloat16": (0.4, 0.15),
}
AUTOCAST = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Case:
    """A net on a batch, and the exact product of its Hessian with its gradient."""

    model: nn.Module
    batch: problems.Batch
    exact: Tensor

    def to(self, dtype: torch.dtype) -> tuple[nn.Module, problems.Batch]:
        """A copy in another precision."""
        return copy.deepcopy(self.model).to(dtype), (self.batch[0].to(dtype), self.batch[1])


@functools.cache
def case(name: str, trained: bool) -> Case:
    model = problems.seeded(NETS[name])
    if trained:
        adam = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(3):
            for batch in problems.batches(64):
                adam.zero_grad()
                problems.loss(model, batch).backward()
                adam.step()
    batch = next(problems.batches(256))
    model.zero_grad()
    return Case(model, batch, exact_product(model, batch))


def exact_product(model: nn.Module, batch: problems.Batch) -> Tensor:
    params = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the kernel that has a second derivative
        grads = torch.autograd.grad(problems.loss(model, batch), params, create_graph=True)
        length = sum(((g * g.detach()).sum() for g in grads), torch.zeros(()))
        return problems.flat(torch.autograd.grad(length, params))


class _GradientProduct(Method):
    """Returns Hg as the direction, so that it can be looked at. (The underscore keeps it out of the registry.)"""

    needs = frozenset({"hvp"})

    def looks(self, ctx):
        here = yield HERE
        return (yield HVP(here.grad, HERE, here))


def relative(error: Tensor, to: Tensor) -> float:
    return float((error.double() - to).norm() / to.norm())


def precision_context(precision: str):
    if precision in AUTOCAST:
        return torch.autocast("cpu", AUTOCAST[precision])
    return contextlib.nullcontext()


def product_by_optimizer(model: nn.Module, batch: problems.Batch, precision: str, hvp: Products) -> Tensor:
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), _GradientProduct(), model, hvp=hvp)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "float16" else None

    def closure() -> Tensor:
        with precision_context(precision):
            return problems.loss(model, batch)

    opt.gradient(closure, scaler=scaler)
    product = problems.flat(p.grad for p in model.parameters())
    return product if scaler is None else product / 1024


def set_weights(model: nn.Module, w: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(w.to(next(model.parameters()).dtype), model.parameters())


def product_by_hand(gradient: Callable[[Tensor], Tensor], w: Tensor, precision: str, central: bool) -> Tensor:
    """What `by_difference` makes of one request; `gradient` is a function of a flat vector."""
    asks = _GradientProduct().looks(None)  # pyright: ignore[reportArgumentType]
    looks = by_difference(asks, w.norm(), lambda: precision, central)
    look = next(looks)
    while True:
        at = w if look.offset is None else w + look.offset.tensors[0]
        try:
            look = looks.send(Seen(Vector([gradient(at)])))
        except StopIteration as end:
            return end.value.tensors[0]


def gradient_of(model: nn.Module, batch: problems.Batch, precision: str) -> Callable[[Tensor], Tensor]:
    scale = 1024.0 if precision == "float16" else 1.0

    def gradient(w: Tensor) -> Tensor:
        set_weights(model, w)
        with precision_context(precision):
            loss = problems.loss(model, batch)
        return problems.flat(torch.autograd.grad(scale * loss, list(model.parameters()))) / scale

    return gradient


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("trained", [False, True], ids=["initial", "trained"])
@pytest.mark.parametrize("name", NETS)
def test_finite_differences_are_as_accurate_as_documented(name, trained, precision):
    """Along the gradient, both ways of driving it, forward and central, in every precision."""
    expected = case(name, trained)
    dtype = torch.float64 if precision == "float64" else torch.float32
    errors = []
    for central in (False, True):
        model, batch = expected.to(dtype)
        product = product_by_optimizer(model, batch, precision, "central" if central else "forward")
        errors.append(relative(product, expected.exact))
        by_hand = product_by_hand(gradient_of(model, batch, precision), problems.weights(model), precision, central)
        errors.append(relative(by_hand, expected.exact))
        assert max(errors[-2:]) < TOLERANCE[precision][central]
    if precision in ("float64", "float32"):
        assert errors[2] < errors[0] / 3  # a second look pays
    assert errors[0] > 1e-12  # and this is not the exact product by another name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_step_of_another_precision_is_worse(precision, monkeypatch):
    """Why there is a table: float64's step drowns in rounding, a large one in the change of the curvature."""
    expected = case("softplus", True)
    model, batch = expected.to(torch.float32)
    gradient, w = gradient_of(model, batch, precision), problems.weights(model)
    right = relative(product_by_hand(gradient, w, precision, False), expected.exact)
    for wrong in (STEP["float64"][0], 0.3):
        monkeypatch.setitem(STEP, precision, (wrong, wrong))
        assert relative(product_by_hand(gradient, w, precision, False), expected.exact) > 2 * right


@pytest.mark.parametrize("central", [False, True])
def test_the_rule_scales_with_the_weights_and_not_with_the_vector(central):
    """L(w/10) at 10w: ten times the step, the same relative error. Any multiple of the vector: the same step."""
    expected = case("softplus", True)
    model, batch = expected.to(torch.float64)
    gradient, w = gradient_of(model, batch, "float64"), problems.weights(model)
    places: list[Tensor] = []

    def tenfold(w: Tensor) -> Tensor:
        places.append(w)
        return gradient(w / 10) / 10

    product = product_by_hand(tenfold, 10 * w, "float64", central)
    for place in places[1:]:
        assert float((place - 10 * w).norm() / (10 * w).norm()) == pytest.approx(STEP["float64"][central], rel=1e-6)
    error = relative(product * 1000, expected.exact)  # the gradient is a tenth, the Hessian a hundredth
    assert error < TOLERANCE["float64"][central]

    products = []
    for factor in (1.0, 1e-6, 1e6):
        products.append(product_by_hand(lambda w, c=factor: c * gradient(w), w, "float64", central) / factor**2)
    for other in products[1:]:
        assert relative(other, products[0]) < TOLERANCE["float64"][central]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_drive_uses_the_difference_step_of_the_weights_dtype(dtype):
    """float64's step would move no float32 weight, and the product would be zero."""
    w = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    product = steppe.drive(_GradientProduct(), lambda w: w**3, w)
    assert relative(product, 3 * w.double() ** 5) < (1e-6 if dtype is torch.float64 else 3e-3)


def test_weights_that_are_all_zero_still_get_a_step():
    product = product_by_hand(lambda w: 3 * w + 1, torch.zeros(4, dtype=torch.float64), "float64", False)
    torch.testing.assert_close(product, torch.full((4,), 3.0, dtype=torch.float64), rtol=1e-4, atol=0)


class AutocastInside(nn.Module):
    """A model that enters autocast by itself, as some do."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.net, self.dtype = mlp(nn.Softplus), dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.net(x)


def relative_step(model: nn.Module, where: str, dtype: torch.dtype | None, hvp: Products, given: bool = True) -> float:
    """How far the difference looks, relative to ‖w‖."""
    batch = next(problems.batches(32, next(model.parameters()).dtype))
    opt = steppe.SharpnessAware(
        torch.optim.SGD(model.parameters(), lr=0.1), _GradientProduct(), model if given else None, hvp=hvp
    )
    places = []

    def autocast(here: str):
        on = dtype is not None and where == here
        return torch.autocast("cpu", dtype) if on else contextlib.nullcontext()

    def closure() -> Tensor:
        places.append(problems.weights(model).double())
        with autocast("closure"):
            with autocast("call"):
                outputs = model(batch[0])
            return F.cross_entropy(outputs.float(), batch[1])

    with autocast("step"):
        if where == "passes":
            for _ in opt.passes():
                with torch.autocast("cpu", dtype):
                    loss = closure()
                loss.backward()
        else:
            opt.gradient(closure)
    assert len(places) == (3 if hvp == "central" else 2)
    return float((places[1] - places[0]).norm() / places[0].norm())


@pytest.mark.parametrize("hvp", ["forward", "central"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("where", ["closure", "call", "step", "passes", "forward"])
def test_autocast_is_detected_wherever_it_is_entered(where, dtype, hvp):
    """Around the closure's body, around the model's call, around the step, in a loop's body, in the model's forward."""
    net = AutocastInside(dtype) if where == "forward" else mlp(nn.Softplus)
    name = str(dtype).removeprefix("torch.")
    assert relative_step(net, where, dtype, hvp) == pytest.approx(STEP[name][hvp == "central"], rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_autocast_the_precision_is_that_of_the_weights(dtype):
    name = str(dtype).removeprefix("torch.")
    for hvp in ("forward", "central"):
        step = relative_step(mlp(nn.Softplus).to(dtype), "nowhere", None, hvp)
        assert step == pytest.approx(STEP[name][hvp == "central"], rel=0.02)


def test_autocast_around_the_step_is_detected_without_the_model():
    step = relative_step(mlp(nn.Softplus), "step", torch.bfloat16, "forward", given=False)
    assert step == pytest.approx(STEP["bfloat16"][0], rel=0.02)


def test_autocast_of_one_step_is_forgotten_in_the_next():
    model = mlp(nn.Softplus)
    assert relative_step(model, "closure", torch.bfloat16, "forward") > 10 * STEP["float32"][0]
    model.zero_grad()
    assert relative_step(model, "nowhere", None, "forward") == pytest.approx(STEP["float32"][0], rel=0.02)


def test_on_kinks_a_difference_is_another_quantity(monkeypatch):
    """A ReLU net's deviation from the Hessian stays as the step shrinks; a softplus net's shrinks with it."""
    batch = problems.digits()
    deviation: dict[str, list[float]] = {}
    for activation in (nn.ReLU, nn.Softplus):
        model = problems.seeded(lambda activation=activation: mlp(activation, 128))
        exact, w = exact_product(model, batch), problems.weights(model)
        gradient = gradient_of(model, batch, "float64")
        for step in (1e-2, 1e-3, 1e-4):
            monkeypatch.setitem(STEP, "float64", (step, step))
            product = product_by_hand(gradient, w, "float64", central=True)
            deviation.setdefault(activation.__name__, []).append(relative(product, exact))
    assert min(deviation["ReLU"]) > 0.1
    assert deviation["ReLU"][-1] > deviation["ReLU"][0]  # fewer kinks on the way, each divided by a smaller step
    assert deviation["Softplus"][0] < 0.1
    for coarse, fine in zip(deviation["Softplus"], deviation["Softplus"][1:], strict=False):
        assert coarse / fine == pytest.approx(100, rel=0.1)  # second order


class _SampleProduct(Method):
    """The Hessian of one example's loss, times the batch's gradient."""

    needs = frozenset({"hvp", "sample"})

    def looks(self, ctx):
        here = yield HERE
        at = Look(batch="sample", sample=1)
        return (yield HVP(here.grad, at, (yield at)))


@pytest.mark.parametrize("hvp", ["forward", "central", "exact"])
def test_the_hessian_of_a_single_example(hvp):
    w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    x = torch.tensor([[1.0, 3.0], [2.0, 1.0]], dtype=torch.float64)
    opt = steppe.SharpnessAware(torch.optim.SGD([w], lr=0.1), _SampleProduct(), hvp=hvp)
    opt.gradient(lambda: (x @ w).pow(3).sum(), sample=lambda i: (x[i] @ w).pow(3))
    with torch.no_grad():
        gradient = 3 * (x @ w).square() @ x
        expected = 6 * (x[1] @ w) * (x[1] @ gradient) * x[1]
    torch.testing.assert_close(w.grad, expected, rtol=1e-6, atol=0)


class _Several(Method):
    """H g, H H g and a gradient away from the weights, asked for together or one after another; their sum."""

    needs = frozenset({"hvp"})

    def __init__(self, way: str):
        self.way = way

    def looks(self, ctx):
        here = yield HERE
        first = yield HVP(here.grad, HERE, here)
        asks = (HVP(here.grad, HERE, here), Look(0.1 * here.grad), HVP(first, HERE, here))
        if self.way == "one by one":
            h_g = yield asks[0]
            there = yield asks[1]
            h_h_g = yield asks[2]
        else:
            h_g, there, h_h_g = yield asks if self.way == "together" else iter(asks)
        return h_g + there.grad + h_h_g


@pytest.mark.parametrize("hvp", ["forward", "central", "exact"])
def test_products_that_are_asked_for_together_are_products(hvp: Products):
    """They were not: `passes` gave the method its own vector, and closures the exact product."""
    found = []
    ways = [(way, loop) for way in ("one by one", "together", "as they are needed") for loop in (False, True)]
    for way, loop in ways if hvp != "exact" else ways[::2]:  # passes() refuses exact products
        model, batch = case("softplus", False).to(torch.float64)
        opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), _Several(way), model, hvp=hvp)
        losses = []

        def closure(model=model, batch=batch, losses=losses):
            losses.append(problems.loss(model, batch))
            return losses[-1]

        if loop:
            opt.zero_grad()
            for _ in opt.passes():
                closure().backward()
        else:
            opt.gradient(closure)
        found.append((problems.flat(p.grad for p in model.parameters()), len(losses)))
    assert all(torch.equal(direction, found[0][0]) for direction, _ in found)
    assert {looks for _, looks in found} == {{"forward": 5, "central": 8, "exact": 5}[hvp]}
