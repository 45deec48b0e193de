"""torch's own optimizers, with the inputs that torch itself tests them with."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import steppe
from helpers.any_base import (
    Case,
    a_group_can_be_added,
    findings,
    it_resumes,
    loss,
    net,
    plain_is_the_base,
    sam_is_two_passes,
)

pytest.importorskip("expecttest", reason="torch's test inputs need it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of inputs that torch itself warns of

CHECKS = [plain_is_the_base, sam_is_two_passes, it_resumes, a_group_can_be_added]
NAMES = ["Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam"]
NAMES += ["RMSprop", "Rprop", "SGD", "SparseAdam"]


def known() -> dict[str, Any]:
    """torch's table of optimizers. Imported late: it takes seconds, and pytest imports this file to collect it."""
    from torch.testing._internal.common_optimizers import optim_db

    infos: list[Any] = optim_db
    return {info.optim_cls.__name__: info for info in infos}


def inputs(info):
    """Settings, with every implementation that works on a CPU."""
    for given in info.optim_inputs_func(device="cpu"):
        yield given.kwargs
        for how in ("foreach", "fused", "differentiable"):
            if how in info.supported_impls:
                yield {**given.kwargs, how: True}


def works_alone(case):
    """Some settings are wrong: a differentiable step on leaf tensors, for example."""
    try:
        case.bare()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_every_input(name):
    if name not in (table := known()):
        pytest.skip(f"this torch has no {name}")
    info, tried, wrong = table[name], 0, []
    for settings in inputs(info):
        make = partial(info.optim_cls, **settings)
        if settings.get("maximize") or name in ("LBFGS", "SparseAdam"):
            with pytest.raises((TypeError, ValueError), match=r"maximize|does not step on one dense gradient"):
                steppe.SharpnessAware(make(list(net().parameters())), steppe.SAM())
            continue
        case = Case(make, biases=name != "Muon")
        if not works_alone(case):
            model, opt = case.wrapped(steppe.Plain())
            with pytest.raises(RuntimeError):
                opt.step(lambda model=model, case=case: loss(model, case.data[0]))
            continue
        tried += 1
        wrong += [(settings, finding) for finding in findings(case, CHECKS)]
    assert wrong == []
    assert tried > 0 or name in ("LBFGS", "SparseAdam")


def test_the_table_is_torch_s():
    """A new optimizer of torch belongs into `NAMES`."""
    assert set(known()) <= set(NAMES)


def test_complex_parameters_are_refused():
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="complex parameters are not supported"):
        steppe.SharpnessAware(torch.optim.SGD([p], lr=0.1), steppe.SAM())
