"""Slices, directions, figures and the monitor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.curvature_problems import cnn, digits, mlp
from steppe.curvature import (
    Hessian,
    Monitor,
    Objective,
    along_trajectory,
    eigenvalues,
    figures,
    line,
    plane,
    random_direction,
)
from steppe.curvature.landscape import Line, Plane, grid


@pytest.fixture
def objective() -> Objective:
    torch.manual_seed(0)
    return Objective(cnn().double(), F.cross_entropy, digits(20, side=4))


def test_filters_have_the_norms_of_the_weights_filters(objective):
    direction = random_direction(objective)
    for name, weight, piece in zip(objective.names, objective.weights(), direction.tensors, strict=True):
        if weight.dim() < 2:
            assert torch.count_nonzero(piece) == 0, name
        else:
            assert torch.allclose(piece.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1), rtol=1e-12)
    entries = torch.cat([t.reshape(-1) for t in direction.tensors])
    assert 0.3 < float((entries[entries != 0] < 0).double().mean()) < 0.7  # both signs


@pytest.mark.parametrize("normalise", ["filter", "layer"])
@pytest.mark.parametrize("norm", [nn.LayerNorm([2, 2]), nn.RMSNorm([2, 2])], ids=["layer", "rms"])
def test_normalisation_layers_are_not_moved_where_they_hold_matrices(normalise, norm):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Flatten()).double()
    objective = Objective(model, F.cross_entropy, (torch.rand(5, 1, 4, 4).double(), torch.zeros(5, dtype=torch.long)))
    first = random_direction(objective, normalise=normalise)
    second = random_direction(objective, normalise=normalise, orthogonal_to=first, seed=1)
    for direction in (first, second):
        moved = [name for name, t in zip(objective.names, direction.tensors, strict=True) if torch.count_nonzero(t)]
        assert moved == ["0.weight"]


@pytest.mark.parametrize("normalise", ["filter", "layer", "model", "none"])
def test_second_directions_are_orthogonal(objective, normalise):
    first = random_direction(objective, normalise=normalise)
    second = random_direction(objective, normalise=normalise, orthogonal_to=first, seed=1)
    assert abs(float(first @ second)) < 1e-12 * float(first.norm() * second.norm())
    if normalise == "filter":
        for a, b, w in zip(first.tensors, second.tensors, objective.weights(), strict=True):
            if w.dim() > 1:
                assert float((a.flatten(1) * b.flatten(1)).sum(1).abs().max()) < 1e-12
                assert torch.allclose(b.flatten(1).norm(dim=1), w.flatten(1).norm(dim=1), rtol=1e-12)
    if normalise == "model":
        assert float(first.norm()) == pytest.approx(float(objective.weights_vector().norm()), rel=1e-12)


class Scaling(nn.Module):
    """One weight per filter, in one layer or in several."""

    def __init__(self, *shapes: tuple[int, ...]):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.rand(shape, dtype=torch.float64) + 0.5) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x @ weight.T).square().mean(1, keepdim=True) for weight in self.layers]).sum(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_filters_of_one_weight_have_no_second_direction(dtype):
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
        x = torch.randn(10, 1, dtype=dtype)
        objective = Objective(model, F.mse_loss, (x, x))
        first = random_direction(objective, seed=seed)
        second = random_direction(objective, orthogonal_to=first, seed=seed + 1)
        assert torch.allclose(first.tensors[0].abs(), model.get_parameter("0.weight").detach().abs(), rtol=1e-5)
        assert torch.count_nonzero(second.tensors[0]) == 0
        assert float(second.tensors[2].norm()) == pytest.approx(
            float(model.get_parameter("2.weight").detach().norm()), rel=1e-5
        )
        assert abs(float(first @ second)) < 100 * torch.finfo(dtype).eps * float(first.norm() * second.norm())


@pytest.mark.parametrize("shapes", [[(6, 1)], [(1, 1), (1, 1), (1, 1)]], ids=["one layer", "a weight per layer"])
def test_a_plane_stays_two_dimensional_where_every_filter_has_one_weight(shapes):
    torch.manual_seed(0)
    x = torch.randn(10, 1, dtype=torch.float64)
    objective = Objective(Scaling(*shapes), F.mse_loss, (x, x))
    first = random_direction(objective)
    second = random_direction(objective, orthogonal_to=first, seed=1)
    assert abs(float(first @ second)) < 1e-12
    assert float(second.norm()) == pytest.approx(float(objective.weights_vector().norm()), rel=1e-12)


def test_a_single_weight_has_no_plane():
    x = torch.ones(3, 1, dtype=torch.float64)
    objective = Objective(nn.Linear(1, 1, bias=False).double(), F.mse_loss, (x, x))
    with pytest.raises(ValueError, match="use line"):
        plane(objective, points=3)


@pytest.mark.parametrize("slice", [line, plane])
@pytest.mark.parametrize("which", ["biases", "zero weights"])
def test_a_direction_without_any_size_is_refused(slice, which):
    model = mlp(4).double()
    if which == "zero weights":
        for p in model.parameters():
            p.data.zero_()
    objective = Objective(model, F.cross_entropy, digits(10, side=4), params="*.bias" if which == "biases" else None)
    with pytest.raises(ValueError, match="leaves no direction"):
        slice(objective, points=3)
    assert float(random_direction(objective, normalise="none").norm()) > 0


def test_grids_are_symmetric_and_contain_zero():
    steps = grid(0.7, 11)
    assert torch.equal(steps, -steps.flip(0)) and float(steps[5]) == 0.0 and float(steps[-1]) == 0.7
    for points in (1, 10):
        with pytest.raises(ValueError, match="odd"):
            grid(1.0, points)
    with pytest.raises(ValueError, match="positive"):
        grid(0.0, 11)


def test_a_line_is_the_loss_of_a_moved_model(objective):
    before = {k: v.clone() for k, v in objective.model.state_dict().items()}
    direction = random_direction(objective)
    found = line(objective, direction, reach=0.5, points=5)
    assert all(torch.equal(before[k], v) for k, v in objective.model.state_dict().items())
    x, y = digits(20, side=4)
    objective.model.eval()
    for step, loss in zip(found.steps.tolist(), found.losses["model"].tolist(), strict=True):
        with torch.no_grad():
            for p, d in zip(objective.model.parameters(), direction.tensors, strict=True):
                p.add_(step * d)
            assert loss == pytest.approx(F.cross_entropy(objective.model(x), y).item(), rel=1e-12)
        objective.model.load_state_dict(before)


def test_several_models_on_one_axis(objective):
    torch.manual_seed(1)
    other = Objective(cnn().double(), F.cross_entropy, digits(20, side=4))
    found = line({"one": objective, "other": other}, points=3)
    assert list(found.losses) == ["one", "other"]
    assert float(found.losses["other"][1]) == pytest.approx(float(other.loss()), rel=1e-12)


def test_a_plane_through_two_eigenvectors_is_the_quadratic_near_the_middle():
    torch.manual_seed(0)
    objective = Objective(mlp(4).double(), F.cross_entropy, digits(20, side=4))
    top = eigenvalues(Hessian(objective), 2, rtol=1e-8)
    first, second = (objective.vector(v) for v in top.vectors.T)
    found = plane(objective, (first, second), reach=1e-3, points=3)
    here, gradient = objective.gradient()
    for i, b in enumerate(found.up.tolist()):
        for j, a in enumerate(found.across.tolist()):
            slope = float(a * (gradient @ first) + b * (gradient @ second))
            bend = (a * a * float(top.values[0]) + b * b * float(top.values[1])) / 2
            assert float(found.losses[i, j] - here) == pytest.approx(slope + bend, abs=1e-9)


def test_a_loss_that_is_not_finite_is_stored():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

        def forward(self, x):
            return self.w.log() * x

    objective = Objective(Root(), lambda o, y: o.mean(), (torch.ones(1), torch.ones(1)))
    way = objective.vector(torch.ones(1, dtype=torch.float64))
    found = line(objective, way, points=5).losses["model"]
    assert found.isnan().tolist() == [True, False, False, False, False]
    assert found.isinf().tolist() == [False, True, False, False, False]
    figures.line_figure(line(objective, way, points=5)).canvas.draw()
    surface = plane(objective, (way, way), points=5)
    assert bool(surface.losses.isnan().any())
    figures.contour_figure(surface).canvas.draw()
    figures.surface_figure(surface).canvas.draw()


def test_the_trajectory_lies_in_its_plane():
    torch.manual_seed(0)
    model, (x, y) = mlp(4).double(), digits(30, side=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    snapshots = []
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        snapshots.append({k: v.clone() for k, v in model.state_dict().items()})
    objective = Objective(model, F.cross_entropy, (x, y))
    found = along_trajectory(objective, snapshots, points=5)
    assert found.path.shape == (12, 2)
    assert torch.allclose(found.path[-1], torch.zeros(2, dtype=torch.float64), atol=1e-12)  # it ends at the weights
    assert float(found.losses[2, 2]) == pytest.approx(float(objective.loss()), rel=1e-12)
    rows = torch.stack([objective.flat([s[n] for n in objective.names]) for s in snapshots])
    rows = rows - rows[-1]
    explained = found.path.square().sum() / rows.square().sum()
    singular = torch.linalg.svdvals(rows)
    assert float(explained) == pytest.approx(float(singular[:2].square().sum() / singular.square().sum()), rel=1e-9)
    with pytest.raises(ValueError, match="two snapshots"):
        along_trajectory(objective, snapshots[:1])
    with pytest.raises(ValueError, match="lacks"):
        along_trajectory(objective, [{}, {}])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("count", [2, 4])
def test_a_straight_path_has_a_plane_as_high_as_it_is_wide(dtype, count):
    torch.manual_seed(0)
    model = mlp(4).to(dtype)
    objective = Objective(model, F.cross_entropy, digits(10, side=4))
    end = objective.flat(objective.weights_vector())
    way = torch.randn(len(end)).to(end)
    found = along_trajectory(objective, [end + k * way for k in reversed(range(count))], points=5)
    length = float((count - 1) * way.norm())
    assert float(found.across[-1]) == pytest.approx(1.25 * length, rel=1e-5)
    assert torch.equal(found.up, found.across)
    assert float(found.losses[2, 2]) == pytest.approx(float(objective.loss()), rel=1e-6)


@pytest.mark.parametrize(
    ("losses", "label", "low", "high"),
    [
        ([1.0, 10.0, 1000.0], "log₁₀ loss", 0.0, 3.0),
        ([0.0, 10.0, 1000.0], "log₁₀ loss", 1.0, 3.0),
        ([-2.0, 0.0, 3.0], "loss", -2.0, 3.0),
        ([-2.0, float("nan"), 3.0], "loss", -2.0, 3.0),
    ],
    ids=["positive", "zero", "negative", "gap"],
)
def test_contours_are_logarithmic_where_there_are_logarithms(losses, label, low, high):
    steps = grid(1, 3)
    figure = figures.contour_figure(Plane(steps, steps, torch.tensor(losses, dtype=torch.float64).repeat(3, 1)))
    axes, bar = figure.axes
    assert bar.get_ylabel() == label
    spacing = (high - low) / 10
    drawn = axes.collections[0].get_clim()
    assert low - spacing <= drawn[0] <= low + spacing and high - spacing <= drawn[1] <= high + spacing


def test_figures_are_written(tmp_path, objective):
    values = torch.linspace(0, 5, 50, dtype=torch.float64)
    shown = Plane(grid(1, 5), grid(1, 5), torch.rand(5, 5).double() + 0.1, path=torch.zeros(3, 2))
    made = {
        "top": figures.top_figure({"a": values, "b": values * 2}),
        "gamma": figures.transformation_figure({"T = 2": torch.tensor([0.1, -0.2])}),
        "line": figures.line_figure(Line(grid(1, 5), {"a": torch.rand(5).double()})),
        "contour": figures.contour_figure(shown),
    }
    for name, figure in made.items():
        for ending in ("png", "svg"):
            path = figures.save(figure, tmp_path / f"{name}.{ending}")
            assert path.stat().st_size > 1000
    pytest.importorskip("plotly", reason="plotly is not installed")
    figures.surface_html(shown, tmp_path / "surface.html")
    page = (tmp_path / "surface.html").read_text(encoding="utf-8")
    assert '"type":"surface"' in page and '"text":"first direction"' in page
    assert all(str(value) in page for value in shown.losses.flatten().tolist())
    assert "<script src=" not in page and "<link" not in page  # it needs no network


def test_the_monitor_measures_at_regular_steps():
    torch.manual_seed(0)
    model, (x, y) = mlp(6).double(), digits(60, side=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = Monitor(Objective(model, F.cross_entropy, (x, y)), every=5, rtol=1e-3, trace_rtol=0.05)
    records = []
    for step in range(1, 21):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        record = monitor()
        assert all(torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True) if p.grad is not None)
        assert (record is not None) == (step % 5 == 0)
        if record is not None:
            dense = Hessian(model, F.cross_entropy, (x, y)).dense()
            truth = float(torch.linalg.eigvalsh(dense)[-1])
            assert record.top == pytest.approx(truth, rel=1e-3)
            assert record.trace is not None and record.trace_error is not None
            assert abs(record.trace - float(dense.trace())) < 5 * record.trace_error
            records.append(record)
    assert records == monitor.history and [r.step for r in records] == [5, 10, 15, 20]
    assert 0 < monitor.cost < 1 and monitor.seconds == pytest.approx(sum(r.seconds for r in records))
    figures.history_figure(monitor.history).canvas.draw()


class Curved(nn.Module):
    """½ wᵀDw: D is its Hessian."""

    diagonal: Tensor

    def __init__(self, diagonal: Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.full_like(diagonal, 0.01))
        self.register_buffer("diagonal", diagonal)

    def forward(self, x: Tensor) -> Tensor:
        return (self.diagonal * self.weight.square()).sum() * x.mean() / 2


@pytest.mark.parametrize("first", [0.9, 0.1])  # an outlier before, or one of the many
def test_the_monitor_sees_an_eigenvalue_that_overtakes(first):
    diagonal = torch.rand(50_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.3
    diagonal[0], diagonal[1] = first, 1.0
    model, one = Curved(diagonal), torch.ones(1, dtype=torch.float64)
    monitor = Monitor(Objective(model, lambda output, _: output, (one, one)), every=1)
    for largest in (first, 1.05, 1.1, 1.2, 1.3):
        model.diagonal[0] = largest
        record = monitor()
        assert record is not None and record.converged and record.top == pytest.approx(max(largest, 1.0), rel=1e-2)


def test_planes_side_by_side_have_one_scale():
    steps = torch.linspace(-1, 1, 5)
    planes = {
        name: Plane(steps, steps, scale * (1 + steps[:, None] ** 2 + steps**2))
        for name, scale in {"a": 1.0, "b": 100.0}.items()
    }
    figure = figures.contours_figure(planes)
    left, right = figure.axes[:2]
    assert [left.get_title(), right.get_title()] == ["a", "b"]
    scales = [list(axes.collections[0].levels) for axes in (left, right)]  # pyright: ignore[reportAttributeAccessIssue]
    assert scales[0] == scales[1] and (scales[0][0], 10 ** scales[0][-1]) == pytest.approx((0.0, 300))
    figure.canvas.draw()
