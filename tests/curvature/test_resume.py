"""A measurement that was stopped and resumed gives the same results as one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers.curvature_problems import digits, mlp
from steppe.curvature import (
    GaussNewton,
    Hessian,
    Krylov,
    Scaled,
    checkpoints,
    eigenvalues,
    frobenius_squared,
    spectrum,
    trace,
)


class Stops(Exception):
    pass


class Interrupted:
    """An operator that fails at its n-th product, as a machine does."""

    def __init__(self, operator, at: int):
        self.operator, self.left = operator, at
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device
        if hasattr(operator, "objective"):
            self.objective = operator.objective

    def __matmul__(self, block):
        self.left -= block.shape[1] if block.dim() == 2 else 1
        if self.left < 0:
            raise Stops
        return self.operator @ block


@pytest.fixture(autouse=True)
def save_always(monkeypatch):
    monkeypatch.setattr(checkpoints, "SAVE_EVERY", 0.0)


MEASURES = {
    "trace": lambda A, **o: trace(A, rtol=1e-2, max_basis=24, **o),
    "frobenius": lambda A, **o: frobenius_squared(A, rtol=5e-3, max_basis=32, **o),
    "hutchinson": lambda A, **o: trace(A, rtol=5e-2, method="hutchinson", **o),
    "hutch++": lambda A, **o: trace(A, rtol=2e-4, method="hutch++", **o),
    "xtrace": lambda A, **o: trace(A, rtol=2e-4, method="xtrace", **o),
}


@pytest.mark.parametrize("name", MEASURES)
def test_resumed_samples_are_equal_to_the_bit(all_problems, tmp_path, name):
    A = all_problems[0][1]
    measure = MEASURES[name]
    unbroken = measure(A, seed=3)
    for at in (5, 70, unbroken.matvecs - 1):
        path = tmp_path / f"{at}.pt"
        with pytest.raises(Stops):
            measure(Interrupted(A, at), seed=3, checkpoint=path)
        counting = Interrupted(A, 10**9)
        resumed = measure(counting, seed=3, checkpoint=path)
        assert torch.equal(resumed.samples, unbroken.samples)
        assert (resumed.value, resumed.standard_error, resumed.matvecs) == (
            unbroken.value, unbroken.standard_error, unbroken.matvecs,
        )  # fmt: skip
        assert 10**9 - counting.left < unbroken.matvecs or at == 5 or name == "xtrace"  # not all was done again
        # Done: read from the file. Only the sketch of Hutch++ is made again.
        assert measure(Interrupted(A, 48 if name == "hutch++" else 0), seed=3, checkpoint=path).value == unbroken.value
    with pytest.raises(ValueError, match="another measurement"):
        measure(counting, seed=4, checkpoint=path)


def test_every_measure_of_a_resumed_run_is_equal_to_the_bit(all_problems, tmp_path):
    A = next(A for problem, A in all_problems if problem.name == "tied")

    def measured(operator, folder: Path | None) -> list[torch.Tensor]:
        def file(name: str) -> Path | None:
            return None if folder is None else folder / name

        run = Krylov(operator, block=4, seed=1, checkpoint=file("run.pt"))
        density = spectrum(run, dimension=40)
        top = eigenvalues(run, 9, rtol=1e-5)
        whole = trace(run, rtol=1e-2, checkpoint=file("trace.pt"))
        return [density.nodes, density.weights, top.values, top.residuals, whole.samples, torch.tensor(whole.matvecs)]

    counting = Interrupted(A, 10**9)
    unbroken = measured(counting, None)
    total = 10**9 - counting.left
    assert total > 200
    # Once in the middle of the trace's samples; and once stopped over and over again, in each of the measures.
    with pytest.raises(Stops):
        measured(Interrupted(A, total - 20), tmp_path / "once")
    resumed = measured(Interrupted(A, 10**9), tmp_path / "once")
    assert all(torch.equal(a, b) for a, b in zip(resumed[4:], unbroken[4:], strict=True))
    top = None
    for _ in range(100):
        try:
            run = Krylov(Interrupted(A, 13), block=4, seed=1, checkpoint=tmp_path / "run.pt")
            top = eigenvalues(run, 9, rtol=1e-5)
            break
        except Stops:
            continue
    straight = eigenvalues(Krylov(A, block=4, seed=1), 9, rtol=1e-5)
    assert top is not None and torch.equal(top.values, straight.values) and torch.equal(top.vectors, straight.vectors)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    data = digits(20, side=4)
    torch.manual_seed(0)
    trace(Hessian(mlp(4), F.cross_entropy, data), rtol=0.1, checkpoint=tmp_path / "trace.pt")
    with pytest.raises(ValueError, match="another measurement"):
        trace(Hessian(mlp(4), F.cross_entropy, data), rtol=0.1, checkpoint=tmp_path / "trace.pt")


def _without_last_layer(seed: int):
    torch.manual_seed(seed)
    net = mlp(4)
    for parameter in list(net.parameters())[-2:]:
        parameter.data.zero_()
    return net


@pytest.mark.parametrize("other", ["matrix", "layer", "weights", "plain matrix", "scale"])
def test_a_checkpoint_of_another_operator_with_the_same_size_and_loss_is_refused(tmp_path, other):
    data, net = digits(20, side=4), _without_last_layer(0)
    H = Hessian(net, F.cross_entropy, data)
    square = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16)
    ).double()
    layers = Hessian(square, F.cross_entropy, data)
    A, ones = torch.diag(torch.arange(1.0, 101)).double(), torch.ones(100, dtype=torch.float64)
    saved, given = {
        "matrix": (H, GaussNewton(H.objective)),
        "layer": (layers.restricted("1.*"), layers.restricted("3.*")),
        "weights": (H, Hessian(_without_last_layer(1), F.cross_entropy, data)),
        "plain matrix": (A, -A),
        "scale": (Scaled(A, ones), Scaled(A, 2 * ones)),
    }[other]
    assert saved.shape == given.shape
    for measure in (eigenvalues, trace):
        path = tmp_path / f"{measure.__name__}.pt"
        measure(saved, rtol=0.1, checkpoint=path)
        measure(saved, rtol=0.1, checkpoint=path)
        with pytest.raises(ValueError, match="another measurement"):
            measure(given, rtol=0.1, checkpoint=path)


SCRIPT = """
import os, signal, sys, torch, torch.nn.functional as F
from steppe.curvature import Hessian, checkpoints, trace
checkpoints.SAVE_EVERY = 0.0
torch.set_num_threads(1)
torch.manual_seed(0)
x, y = torch.linspace(-1, 1, 40 * 16).sin().reshape(40, 16).double(), torch.arange(40) % 10
net = torch.nn.Sequential(torch.nn.Linear(16, 6), torch.nn.Softplus(), torch.nn.Linear(6, 10)).double()
H = Hessian(net, F.cross_entropy, (x, y))
multiply, left = H._multiply, [int(sys.argv[2])]
def until_killed(rows):
    left[0] -= len(rows)
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return multiply(rows)
H._multiply = until_killed
for checkpoint in (sys.argv[1], None):
    found = trace(H, rtol=2e-2, max_basis=16, checkpoint=checkpoint)
    print("RESULT", found.value.hex(), found.standard_error.hex(), found.matvecs, len(found.samples))
"""


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bits(tmp_path):
    here = Path(__file__).parent
    paths = [str(here.parent), str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def run(checkpoint: str, products: int) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", SCRIPT, checkpoint, str(products)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600, check=False)

    for products in (20, 90):  # while the basis grows, and while probes are drawn
        assert run(str(tmp_path / "trace.pt"), products).returncode == -signal.SIGKILL
    end = run(str(tmp_path / "trace.pt"), 10**9)
    _, resumed, unbroken = end.stdout.split("RESULT")
    assert resumed.split() == unbroken.split()


def test_a_checkpoint_of_other_data_is_refused_even_if_the_loss_is_the_same(tmp_path):
    net, (x, y) = _without_last_layer(0), digits(20, side=4)
    trace(Hessian(net, F.cross_entropy, (x, y)), rtol=0.1, checkpoint=tmp_path / "trace.pt")
    with pytest.raises(ValueError, match="another measurement"):
        trace(Hessian(net, F.cross_entropy, (5 * x, y)), rtol=0.1, checkpoint=tmp_path / "trace.pt")


def test_a_checkpoint_of_a_run_with_another_start_is_refused(tmp_path):
    A, start = torch.diag(torch.arange(1.0, 41)).double(), torch.ones(40, 1, dtype=torch.float64)
    Krylov(A, start=start, checkpoint=tmp_path / "run.pt").extend(3)
    assert Krylov(A, start=start, checkpoint=tmp_path / "run.pt").dimension == 3
    for other in (2 * start.cumsum(0), None):
        with pytest.raises(ValueError, match="another measurement"):
            Krylov(A, start=other, checkpoint=tmp_path / "run.pt")
