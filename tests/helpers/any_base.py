"""Checks that must hold for any base optimizer. Each returns what is wrong, or an empty text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import steppe
from helpers.problems import batches, everything, same, weights

MakeBase = Callable[[list[Any]], Optimizer]  # from parameters
RHO = 0.05


def net(dtype: torch.dtype = torch.float64, biases: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 8, bias=biases), nn.Tanh(), nn.Linear(8, 10, bias=biases)).to(dtype)


class Case:
    """A base optimizer on a small net, on digits."""

    def __init__(self, make: MakeBase, dtype: torch.dtype = torch.float64, biases: bool = True, steps: int = 3):
        self.make, self.dtype, self.biases = make, dtype, biases
        stream = batches(24, dtype)
        self.data = [next(stream) for _ in range(steps)]

    def start(self) -> tuple[nn.Sequential, Optimizer]:
        model = net(self.dtype, self.biases)
        torch.manual_seed(1)  # some bases draw, also from NumPy
        numpy.random.seed(1)
        return model, self.make(list(model.parameters()))

    def wrapped(self, method: steppe.Method) -> tuple[nn.Sequential, steppe.SharpnessAware]:
        model, base = self.start()
        return model, steppe.SharpnessAware(base, method, model)

    def bare(self) -> tuple[nn.Sequential, Optimizer]:
        """Train with the base alone."""
        model, base = self.start()
        for batch in self.data:
            base.zero_grad()
            loss(model, batch).backward()
            base.step()
        return model, base


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def plain_is_the_base(case: Case) -> str:
    """`Plain` is the base alone, to the last bit."""
    expected = everything(case.bare()[0])
    model, opt = case.wrapped(steppe.Plain())
    for batch in case.data:
        opt.step(lambda batch=batch: loss(model, batch))
    return "" if same(everything(model), expected) else "Plain is not the bare base"


def sam_is_two_passes(case: Case, tolerance: float = 1e-9) -> str:
    """`SAM` follows its equations. Some bases (SOAP) amplify rounding: a deviation of that size is no error."""
    expected = _two_passes(case, RHO)
    model, opt = case.wrapped(steppe.SAM(rho=RHO))
    for batch in case.data:
        opt.step(lambda batch=batch: loss(model, batch))
    off = float((weights(model) - expected).abs().max())
    if off <= tolerance * max(1.0, float(expected.abs().max())):
        return ""
    own = float((_two_passes(case, RHO * (1 + 1e-14)) - expected).abs().max())
    return "" if off <= 10 * own else f"SAM is off by {off:.1e}"


def _two_passes(case: Case, rho: float) -> Tensor:
    """The weights after steps by SAM's equations: in float64, tensor by tensor, without the engine."""
    model, base = case.start()
    params = list(model.parameters())
    for batch in case.data:
        base.zero_grad()
        loss(model, batch).backward()
        grads = [_grad(p).double() for p in params]
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        home = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p.copy_((p.double() + rho * g / norm).to(p.dtype))
        base.zero_grad()
        loss(model, batch).backward()
        with torch.no_grad():
            for p, w in zip(params, home, strict=True):
                p.copy_(w)
        base.step()
    return weights(model)


def it_resumes(case: Case) -> str:
    """Saved and loaded after two steps, training continues with the same bits, if that holds for the base alone."""
    if not the_bare_base_resumes(case):
        return ""
    model, opt = case.wrapped(steppe.SAM(rho=RHO))
    for i, batch in enumerate(case.data):
        if i == 2:
            saved = copy.deepcopy((model.state_dict(), opt.state_dict(), torch.get_rng_state()))
            fresh, resumed = case.wrapped(steppe.SAM(rho=RHO))
            fresh.load_state_dict(saved[0])
            resumed.load_state_dict(saved[1])
            torch.set_rng_state(saved[2])
            model, opt = fresh, resumed
        opt.step(lambda model=model, batch=batch: loss(model, batch))
    straight, other = case.wrapped(steppe.SAM(rho=RHO))
    for batch in case.data:
        other.step(lambda batch=batch: loss(straight, batch))
    return "" if same(everything(model), everything(straight)) else "it does not resume to the same bits"


def the_bare_base_resumes(case: Case) -> bool:
    """Whether that holds for the base alone. Some do not save all of their state; NAdam's loses precision."""
    model, base = case.start()
    for i, batch in enumerate(case.data):
        if i == 2:
            saved = copy.deepcopy((model.state_dict(), base.state_dict(), torch.get_rng_state()))
            model, base = case.start()
            model.load_state_dict(saved[0])
            try:
                base.load_state_dict(saved[1])
            except Exception:
                return False
            torch.set_rng_state(saved[2])
        base.zero_grad()
        loss(model, batch).backward()
        try:
            base.step()
        except Exception:
            return False
    return same(everything(model), everything(case.bare()[0]))


def a_group_can_be_added(case: Case) -> str:
    """A group that is added after a step is trained as the base alone would train it."""
    ends = []
    for wrapped in (False, True):
        model = net(case.dtype, case.biases)
        torch.manual_seed(1)
        first, last = list(model[0].parameters()), list(model[2].parameters())
        base = case.make(first)
        opt: Any = steppe.SharpnessAware(base, steppe.Plain(), model) if wrapped else base
        for i, batch in enumerate(case.data):
            if i == 1:
                opt.add_param_group({"params": last})
            opt.zero_grad()
            for _ in opt.passes() if wrapped else [None]:
                loss(model, batch).backward()
            opt.step()
        ends.append(everything(model))
    return "" if same(*ends) else "an added group is not trained as the base alone would"


def findings(case: Case, checks: list[Callable[[Case], str]]) -> Iterator[str]:
    """What the checks find. An exception in a check is a finding too."""
    for check in checks:
        try:
            wrong = check(case)
        except Exception as error:
            wrong = f"{check.__name__}: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
        if wrong:
            yield wrong


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad
