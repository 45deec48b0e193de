"""Bases that are not like torch's own: what works, and what is refused before the first look."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn

import steppe


def net():
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=torch.float64)


def loss_of(model):
    return model(torch.ones(4, 3, dtype=torch.float64)).square().mean()


class CountsInState(torch.optim.SGD):
    """Keeps a step count in its state beside the parameters' entries, as MADGRAD does."""

    def step(self, closure=None):
        state = cast(Any, self.state)  # torch types its keys as tensors
        state["k"] = state.get("k", torch.zeros(())) + 1
        return super().step(closure)


@pytest.mark.parametrize("method", [steppe.SAM(), steppe.FSAM(), steppe.GSAM()], ids=lambda m: m.name)
def test_state_that_is_not_a_parameter_s_is_saved_and_loaded(method):
    model = net()
    opt = steppe.SharpnessAware(CountsInState(model.parameters(), lr=0.1, momentum=0.9), method, model)
    for _ in range(3):
        opt.step(lambda: loss_of(model))
    saved = copy.deepcopy(opt.state_dict())
    other = copy.deepcopy(model)
    resumed = steppe.SharpnessAware(CountsInState(other.parameters(), lr=0.1, momentum=0.9), method, other)
    resumed.load_state_dict(saved)
    assert float(resumed.base.state["k"]) == 3
    opt.step(lambda: loss_of(model))
    resumed.step(lambda: loss_of(other))
    assert torch.equal(model.weight, other.weight)


class TwoModes(torch.optim.SGD):
    """Evaluates at other weights than it trains, as schedule-free optimizers do."""

    mode = "train"

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"


def test_modes_of_the_base_are_forwarded():
    model = net()
    weight, bias = model.parameters()
    one = steppe.SharpnessAware(TwoModes([weight], lr=0.1), steppe.SAM())
    several = steppe.SharpnessAware([TwoModes([weight], lr=0.1), torch.optim.SGD([bias], lr=0.1)], steppe.SAM())
    for opt, base in ((one, one.base), (several, several.base.bases[0])):
        opt.eval()
        assert base.mode == "eval"
        opt.train()
        assert base.mode == "train"
    steppe.SharpnessAware(torch.optim.SGD([weight], lr=0.1), steppe.SAM()).eval()  # nothing to do


def made(name, module, **members):
    return type(name, (torch.optim.SGD,), {"__module__": module, **members})


def needs_closure(self, closure):
    return closure()


def needs_another_argument(self, loss_function):
    return loss_function()


def subclass_of(base):
    return type("Derived", (base,), {"__module__": "mine"})


REFUSED = [
    (made("DPOptimizer", "opacus.optimizers.optimizer"), "train privately with the plain optimizer"),
    (made("DeepSpeedZeroOptimizer", "deepspeed.runtime.zero.stage3"), "fully_shard"),
    (made("AliG", "pytorch_optimizer.optimizer.alig"), "does not step on one dense gradient"),
    (made("AdaHessian", "pytorch_optimizer.optimizer.adahessian"), "does not step on one dense gradient"),
    (made("SophiaH", "pytorch_optimizer.optimizer.sophia"), "does not step on one dense gradient"),
    (made("Mine", "mine", step=needs_closure), "does not step on one dense gradient"),
    (made("Own", "mine", step=needs_another_argument), "does not step on one dense gradient"),
    (subclass_of(made("DPOptimizer", "opacus.optimizers.optimizer")), "train privately with the plain optimizer"),
    (subclass_of(made("DeepSpeedCPUAdam", "deepspeed.ops.adam")), "fully_shard"),
    (subclass_of(made("AliG", "pytorch_optimizer.optimizer.alig")), "does not step on one dense gradient"),
    (made("Odd", "mine", state_dict=lambda self: {"fast": {}, "slow": {}}), "the keys state and param_groups"),
]


@pytest.mark.parametrize(("base", "why"), REFUSED, ids=[f"{b.__base__.__name__}-{b.__name__}" for b, _ in REFUSED])
def test_bases_that_take_more_than_one_gradient_are_refused(base, why):
    model = net()
    with pytest.raises(TypeError, match=why):
        steppe.SharpnessAware(base(model.parameters(), lr=0.1), steppe.SAM(), model)


def test_a_deepspeed_engine_is_refused():
    model = net()
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    for shown in (engine, nn.Sequential(engine)):
        with pytest.raises(TypeError, match="fully_shard"):
            steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(), shown)


@pytest.mark.parametrize("mark", ["ds_id", "_hp_mapping"])
def test_parameters_that_deepspeed_has_partitioned_are_refused(mark):
    """Also where the engine is not shown: `model` is None, or the module inside the engine."""
    model = net()
    setattr(model.weight, mark, 0)
    for shown in (model, None):
        with pytest.raises(TypeError, match="fully_shard"):
            steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(), shown)


def test_a_base_whose_step_a_scheduler_has_replaced_is_not_refused():
    model = net()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1)
    steppe.SharpnessAware(base, steppe.SAM(), model).step(lambda: loss_of(model))
    scheduler.step()


def test_quantised_weights_are_refused():
    """A tensor that is made of other tensors, as those of torchao and of GPTQ are."""
    from torch.testing._internal.two_tensor import TwoTensor

    values = torch.ones(2, 3)
    weight = nn.Parameter(TwoTensor(values, values))
    with pytest.raises(TypeError, match="quantised parameters are not supported"):
        steppe.SharpnessAware(torch.optim.SGD([weight], lr=0.1), steppe.SAM())


def test_a_pipeline_stage_is_refused_with_a_hint():
    from torch.distributed.pipelining.stage import PipelineStage

    stage = object.__new__(PipelineStage)
    model = net()
    with pytest.raises(TypeError, match=r"model=stage\.submod and norm_group="):
        steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(), stage)  # pyright: ignore


def test_a_loss_that_reaches_no_parameter_warns_once():
    model, other = net(), net()
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(), model)
    with pytest.warns(UserWarning, match="reaches no parameter of this optimizer"):
        opt.step(lambda: loss_of(other))
    opt.step(lambda: loss_of(other))  # a second warning would be an error


def test_a_closure_that_calls_backward_and_reaches_no_parameter_is_said():
    model, other = net(), nn.Sequential(net(), nn.Softplus())

    def closure():
        loss = loss_of(other)
        loss.backward()
        return loss

    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(), model)
    with pytest.raises(RuntimeError, match="its loss reaches no parameter of this optimizer"):
        opt.step(closure)


def test_a_method_that_sets_the_learning_rate_warns_of_momentum_once():
    model = net()
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), steppe.SASAM(), model)
    with pytest.warns(UserWarning, match="with momentum it overshoots"):
        opt.step(lambda: loss_of(model))
    opt.step(lambda: loss_of(model))  # a second warning would be an error
