"""Optimizers of other libraries as bases: they work as they do alone, or are refused in one line when wrapped."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import steppe
from helpers.any_base import Case, findings, it_resumes, plain_is_the_base, sam_is_two_passes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _uncompiled():
    """Some libraries compile parts of a step: what is computed is the same, and compiling takes a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def verdict(make, tolerance=1e-9):
    """ "not alone", "refused", or what is wrong with the base, "" if nothing is."""
    case = next((c for c in map(partial(Case, make), (torch.float64, torch.float32)) if works_alone(c)), None)
    if case is None:
        return "not alone"
    try:
        steppe.SharpnessAware(case.start()[1], steppe.SAM())
    except TypeError as error:
        return "refused" if "\n" not in str(error) else f"refused in several lines: {error}"
    if case.dtype is torch.float32:
        tolerance = max(tolerance, 1e-3)
    checks = [plain_is_the_base, partial(sam_is_two_passes, tolerance=tolerance), it_resumes]
    return "; ".join(findings(case, checks))


def works_alone(case):
    """Whether the base takes these parameters and steps without a closure."""
    try:
        case.bare()
    except Exception:
        return False
    return True


@pytest.mark.parametrize("part", range(4))
def test_pytorch_optimizer(part):
    library = pytest.importorskip("pytorch_optimizer")
    names = sorted(library.get_supported_optimizers())[part::4]
    said = {name: verdict(partial(library.load_optimizer(name), lr=1e-3)) for name in names}
    print(said)
    assert {name: what for name, what in said.items() if what not in ("", "refused", "not alone")} == {}
    assert sum(what == "" for what in said.values()) > len(said) // 2


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_schedulefree(name):
    cls = getattr(pytest.importorskip("schedulefree"), name)

    def make(params):
        base = cls(params, lr=0.01)
        base.train()
        return base

    assert verdict(make) == ""


def test_prodigy():
    assert verdict(pytest.importorskip("prodigyopt").Prodigy) == ""


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao(name):
    cls = getattr(pytest.importorskip("torchao.optim"), name)
    assert verdict(partial(cls, lr=1e-3)) in ("", "not alone")
