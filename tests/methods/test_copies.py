"""A method holds as many copies of the model as it declares, on a model with negligible activations."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from steppe import CRSAM, FSAM, GAM, GNAM, GSAM, SAM, SSAM, EntropySGD, Every, LookSAM, Plain, SharpnessAware
from steppe.methods.registry import own_methods as known_methods

FIRST = [next(iter(cls.variants())) for cls in known_methods()]
OTHER = [method for cls in known_methods() for method in [*cls.variants()][1:]]
COMPOSED = [
    GNAM(oracle=SAM()),
    GNAM(oracle=GSAM()),
    GNAM(oracle=FSAM()),
    GNAM(oracle=CRSAM()),  # a sum of three gradients: it is kept as one
    GNAM(oracle=EntropySGD(L=2)),
    LookSAM(k=2),
    SSAM(every=2, samples=2),
    SSAM(rule="dynamic", every=2),
    SSAM(rule="dynamic", every=2, total=20),
    GSAM(ascent="adaptive"),
    GAM(discrepancy="squared"),
    Every(2, FSAM()),
    Every(2, FSAM(), between=LookSAM(k=2)),
    Every(2, CRSAM(), between=FSAM()),
    Every(3, GNAM(), between=FSAM()),
]


@pytest.fixture(scope="module")
def live_bytes():
    """A function that measures live bytes, from the benchmark of peak memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("peak_memory").LiveBytes


@pytest.fixture(scope="module")
def plain(live_bytes):
    return peak(Plain(), live_bytes)


def peak(method, live_bytes, steps=6):
    """Bytes at the peak of a few steps, over those of the parameters."""
    torch.manual_seed(0)
    with live_bytes() as meter:
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])
        x, y = torch.randn(2, 512), torch.tensor([1, 2])
        base = torch.optim.SGD(model.parameters(), lr=0.0)
        opt = SharpnessAware(base, method, model)
        opt.step(loss := lambda: cross_entropy(model(x), y), auxiliary=loss, sample=lambda i: loss())
        meter.peak = meter.now
        for _ in range(steps):
            opt.step(loss, auxiliary=loss, sample=lambda i: loss())
    return meter.peak / sum(4 * p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "method", [*FIRST, *(pytest.param(m, marks=pytest.mark.slow) for m in OTHER + COMPOSED)], ids=lambda m: m.name
)
def test_a_method_holds_as_many_copies_as_it_declares(method, live_bytes, plain):
    measured = peak(method, live_bytes) - plain
    assert abs(measured - method.copies) < 0.2, "an eighth of the model, at most, may be in hand at a time"


def test_no_more_copies_if_torch_compile_evaluates_frames(live_bytes, plain):
    """After a failed compilation torch evaluates frames itself, and holds a function's arguments until it returns."""

    def breaks(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(Exception, match="graph"):
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(1))
    assert peak(GSAM(), live_bytes) - plain < GSAM().copies + 0.2
