"""Data in all its forms, and inputs that cannot be measured."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.curvature_problems import digits, mlp, ragged
from steppe.curvature import Hessian, Objective, eigenvalues, extrema, first_order, sharpness, surrogate_gap, trace
from steppe.curvature import Measure as SharpnessMeasure


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return mlp(4).double()


def expected_loss(model: nn.Module, count: int = 50) -> float:
    x, y = digits(count, side=4)
    return F.cross_entropy(model(x), y).item()


def loader(count: int = 50, **options) -> torch.utils.data.DataLoader:
    dataset = torch.utils.data.TensorDataset(*digits(count, side=4))
    return torch.utils.data.DataLoader(dataset, batch_size=16, **options)


@pytest.mark.parametrize(
    "data",
    [
        lambda: digits(50, side=4),
        lambda: list(digits(50, side=4)),
        lambda: ragged(digits(50, side=4), 49, 1),
        lambda: iter(ragged(digits(50, side=4), 30, 20)),
        lambda: loader(),
        lambda: loader(shuffle=True),
        lambda: [{"pixels": x, "labels": y} for x, y in ragged(digits(50, side=4), 30, 20)],
    ],
    ids=["pair", "list of two", "ragged", "iterator", "loader", "shuffling loader", "dictionaries"],
)
def test_the_loss_is_the_mean_over_all_samples(model, data, request):
    options = {}
    loss_fn = F.cross_entropy
    if "dictionaries" in request.node.name:
        options["forward"] = lambda model, batch: model(batch["pixels"])
        loss_fn = lambda output, batch: F.cross_entropy(output, batch["labels"])  # noqa: E731
    objective = Objective(model, loss_fn, data(), **options)
    for _ in range(2):
        assert float(objective.loss()) == pytest.approx(expected_loss(model), rel=1e-12)


@pytest.mark.parametrize("place", ["loader", "sampler", "batch sampler", "in the batch sampler"])
def test_a_loader_s_own_generator_is_reseeded_and_restored(model, place):
    dataset, own = torch.utils.data.TensorDataset(*digits(50, side=4)), torch.Generator().manual_seed(5)
    drawn = torch.utils.data.RandomSampler(dataset, generator=own)

    class Blocks:
        generator = own

        def __iter__(self):
            yield from torch.randperm(50, generator=self.generator).split(16)

    options = {
        "loader": {"batch_size": 16, "shuffle": True, "generator": own},
        "sampler": {"batch_size": 16, "sampler": drawn},
        "batch sampler": {"batch_sampler": Blocks()},
        "in the batch sampler": {"batch_sampler": torch.utils.data.BatchSampler(drawn, 16, drop_last=False)},
    }[place]
    before = own.get_state()
    data = torch.utils.data.DataLoader(dataset, **options)
    some = Objective(model, F.cross_entropy, data, samples=20, cache_bytes=0)
    assert some.loss() == some.loss()
    assert torch.equal(own.get_state(), before)


def test_streaming_gives_the_same_and_reads_every_time(model):
    reads = []

    class Counting:
        def __iter__(self):
            reads.append(1)
            yield from ragged(digits(50, side=4), 30, 20)

    streamed = Hessian(model, F.cross_entropy, Counting(), cache_bytes=0, way="fresh")
    kept = Hessian(model, F.cross_entropy, Counting())
    v = torch.ones(kept.shape[0], dtype=torch.float64)
    assert torch.allclose(streamed @ v, kept @ v, rtol=1e-13)
    before = len(reads)
    _ = streamed @ v, kept @ v
    assert len(reads) == before + 1


def test_an_iterator_too_large_to_keep_is_refused(model):
    with pytest.raises(TypeError, match="read only once"):
        Objective(model, F.cross_entropy, iter(ragged(digits(50, side=4), 30, 20)), cache_bytes=10).loss()


def test_restricted_selects_among_the_measured_parameters():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    net[0].bias.requires_grad_(False)
    data = torch.ones(4, 3, dtype=torch.float64), torch.arange(4) % 2
    H = Hessian(net, F.cross_entropy, data)
    whole, first = H.dense(), slice(0, 12)
    assert H.objective.names == ["0.weight", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert torch.allclose(H.restricted(net[0]).dense(), whole[first, first], rtol=1e-12, atol=1e-15)
    assert torch.allclose(H.restricted("0.*").dense(), whole[first, first], rtol=1e-12, atol=1e-15)
    some = Hessian(net, F.cross_entropy, data, params=["0.*", "2.*"])
    assert some.restricted("*.weight").objective.names == ["0.weight", "2.weight"]
    assert some.restricted(lambda name, p: p.dim() == 1).objective.names == ["0.bias", "2.bias"]
    with pytest.raises(ValueError, match="selection is empty"):
        some.restricted("4.*")


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):  # pyright: ignore[reportIncompatibleMethodOverride]
        return slope * (1 - ctx.saved_tensors[0].tanh() ** 2)


class OnlyDifferences(nn.Module):
    """No second derivative: products are central differences, after two other ways have failed on the first batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 5).double(), nn.Linear(5, 10).double()

    def forward(self, x):
        return self.last(OnceDifferentiable.apply(self.first(x.flatten(1))))


def test_an_iterator_is_whole_after_a_pass_that_failed():
    net, batches = OnlyDifferences(), ragged(digits(50, side=4), 10, 10, 10, 10, 10)
    H, listed = (Hessian(net, F.cross_entropy, data) for data in (iter(batches), batches))
    v = torch.ones(H.shape[0], dtype=torch.float64)
    assert torch.equal(H @ v, listed @ v)
    assert float(H.objective.loss()) == pytest.approx(expected_loss(net), rel=1e-12)


@pytest.mark.parametrize("adaptive", [False, True])
def test_first_order_flatness_needs_no_second_derivative(adaptive):
    net, data = OnlyDifferences(), digits(50, side=4)
    smooth = nn.Sequential(nn.Flatten(), net.first, nn.Tanh(), net.last)
    found, expected = (
        first_order(Objective(each, F.cross_entropy, data), rho=0.05, adaptive=adaptive) for each in (net, smooth)
    )
    assert found.value == pytest.approx(expected.value, rel=1e-6)


def test_a_sample_is_the_first_of_a_pass(model):
    objective = Objective(model, F.cross_entropy, loader(), samples=20)
    assert float(objective.loss()) == pytest.approx(expected_loss(model, 20), rel=1e-12)


def test_a_weight_function_of_the_user(model):
    x, y = digits(30, side=4)
    halves = [(x[:10], y[:10]), (x[10:], y[10:])]
    objective = Objective(model, F.cross_entropy, halves, weight=lambda batch: 1.0)
    mean = (F.cross_entropy(model(x[:10]), y[:10]) + F.cross_entropy(model(x[10:]), y[10:])) / 2
    assert float(objective.loss()) == pytest.approx(mean.item(), rel=1e-12)


class Partial(functools.partial):
    """A partial that `functools.partial` does not merge with the one around it."""


WEIGHTS = torch.linspace(0.2, 3, 10, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss_fn", "is_sum"),
    [
        (functools.partial(F.cross_entropy, reduction="sum"), True),
        (functools.partial(nn.CrossEntropyLoss(reduction="sum")), True),
        (functools.partial(Partial(F.cross_entropy, reduction="sum"), ignore_index=3), True),
        (functools.partial(F.cross_entropy, ignore_index=3), False),
        (functools.partial(F.cross_entropy, weight=WEIGHTS), False),
        (functools.partial(Partial(F.cross_entropy, weight=WEIGHTS, ignore_index=0), ignore_index=3), False),
        (nn.MultiMarginLoss(weight=WEIGHTS), False),
        (functools.partial(F.multi_margin_loss, weight=WEIGHTS), False),
    ],
)
def test_settings_of_the_loss_are_respected(model, loss_fn, is_sum):
    x, y = digits(50, side=4)
    objective = Objective(model, loss_fn, ragged((x, y), 9, 30, 11))
    assert objective.reduction == ("sum" if is_sum else "mean")
    assert float(objective.loss()) == pytest.approx(loss_fn(model(x), y).item(), rel=1e-12)


def test_a_partial_that_does_not_reduce_is_refused(model):
    with pytest.raises(ValueError, match="not 'none'"):
        Objective(model, functools.partial(F.cross_entropy, reduction="none"), digits(20, side=4))


def test_a_batch_whose_targets_are_all_ignored_counts_nothing(model):
    x, y = digits(30, side=4)
    ignored = torch.full_like(y[:10], -100)
    objective = Objective(model, F.cross_entropy, [(x[:10], ignored), (x[10:], y[10:])])
    assert float(objective.loss()) == pytest.approx(F.cross_entropy(model(x[10:]), y[10:]).item(), rel=1e-12)


def test_at_measures_elsewhere_and_does_not_move_the_weights(model):
    objective = Objective(model, F.cross_entropy, digits(50, side=4))
    before = [p.detach().clone() for p in model.parameters()]
    offset = objective.vector(torch.full((objective.size,), 0.1, dtype=torch.float64))
    there = float(objective.loss(offset))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    assert there == expected_loss(model)


def test_data_that_changes_between_passes_is_refused(model):
    class Augmented:
        noise = 0.0

        def __iter__(self):
            self.noise += 0.5  # not drawn from any generator that could be rewound
            x, y = digits(50, side=4)
            yield x + self.noise, y

    H = Hessian(model, F.cross_entropy, Augmented(), cache_bytes=0, way="fresh")
    v = torch.ones(H.shape[0], dtype=torch.float64)
    _ = H @ v
    with pytest.raises(ValueError, match="random"):
        _ = H @ v


def test_a_loader_that_augments_randomly_gives_the_same_data(model):
    class Augmented:
        def __iter__(self):
            x, y = digits(50, side=4)
            yield x + torch.rand_like(x), y

    H = Hessian(model, F.cross_entropy, Augmented(), cache_bytes=0, way="fresh")
    v = torch.ones(H.shape[0], dtype=torch.float64)
    assert torch.equal(H @ v, H @ v)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": []}, ValueError, "empty"),
        ({"data": 3}, TypeError, "iterable"),
        ({"data": torch.utils.data.TensorDataset(torch.zeros(2, 16))}, TypeError, "DataLoader"),
        ({"data": [torch.zeros(3, 16)]}, TypeError, "forward="),
        ({"loss_fn": lambda output, y: output.sum() * float("nan")}, ValueError, "nan"),
        ({"loss_fn": lambda output, y: output.detach().sum()}, ValueError, "no gradient"),
        ({"loss_fn": lambda output, y: (output.argmax(1) == y).double().mean()}, ValueError, "no gradient"),
        ({"loss_fn": lambda output, y: F.cross_entropy(output, y, reduction="none")}, ValueError, "one number"),
        ({"loss_fn": nn.CrossEntropyLoss(reduction="none")}, ValueError, "reduced"),
        ({"params": "nothing.*"}, ValueError, "no parameter is called"),
        ({"params": []}, ValueError, "no parameters"),
        ({"params": [nn.Parameter(torch.zeros(2))]}, ValueError, "not parameters of the model"),
        ({"mode": "training"}, ValueError, "mode"),
        ({"samples": 0}, ValueError, "samples"),
        ({"model": mlp(4).half()}, TypeError, "too coarse"),
        ({"model": lambda x: x}, TypeError, "Module"),
    ],
)
def test_what_cannot_be_measured_says_what_to_do(model, change, error, message):
    arguments = {"model": model, "loss_fn": F.cross_entropy, "data": digits(20, side=4), **change}
    with pytest.raises(error, match=message):
        Hessian(arguments.pop("model"), arguments.pop("loss_fn"), arguments.pop("data"), **arguments).dense()


def test_a_tied_parameter_is_selected_by_any_of_its_names():
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    objective = Objective(model, F.cross_entropy, digits(20, side=4), params="1.*")
    assert objective.names == ["0.weight", "1.bias"]


@pytest.mark.parametrize("rho", [0.0, -0.1, float("nan")])
def test_a_radius_must_be_positive(model, rho):
    objective = Objective(model, F.cross_entropy, digits(20, side=4))
    for measure in (surrogate_gap, first_order):
        with pytest.raises(ValueError, match="positive"):
            measure(objective, rho)
    with pytest.raises(ValueError, match="positive"):
        extrema(objective, step=-1.0)
    with pytest.raises(ValueError, match="positive"):
        sharpness(objective, SharpnessMeasure.trace(), by="losses", rho=-1.0)


def test_operators_refuse_what_they_cannot_multiply(model):
    H = Hessian(model, F.cross_entropy, digits(20, side=4))
    with pytest.raises(ValueError, match=str(H.shape[0])):
        _ = H @ torch.ones(3)
    with pytest.raises(TypeError, match="already has"):
        Hessian(H.objective, F.cross_entropy)
    with pytest.raises(TypeError, match="give a model"):
        Hessian(model)
    with pytest.raises(ValueError, match="way"):
        Hessian(H.objective, way="magic")  # pyright: ignore[reportArgumentType]


def test_a_linear_loss_has_a_zero_hessian(model):
    linear = nn.Linear(16, 10).double()
    H = Hessian(linear, lambda output, y: output.sum(), (digits(20, side=4)[0].flatten(1), torch.zeros(20)))
    assert torch.count_nonzero(H.dense()) == 0
    top = eigenvalues(H, k=3)
    assert torch.count_nonzero(top.values) == 0 and bool(top.converged.all())
    whole = trace(H)
    assert (whole.value, whole.standard_error, whole.converged) == (0.0, 0.0, True)
