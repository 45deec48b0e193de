"""torch.distributed.checkpoint: save in the middle, load into something fresh, go on to the same bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers.grids import grid
from helpers.ranks import (
    BASES,
    Drift,
    Net,
    all_methods,
    assert_identical,
    assert_ranks_agree,
    digits,
    sharded,
    tensors_in,
    train,
    train_any,
    unchanged,
    whole,
)
from steppe import GSAM, SAM, Every, SharpnessAware, Space

WRAPPERS = {"ddp": DDP, "fsdp2": sharded, "fsdp2-one-whole": lambda net: sharded(net, unsharded=[net.heat])}
REMEMBERING = {name: m for name, m in all_methods().items() if m.memory(Space([torch.zeros(1)]))}
BY_THE_STEP = {name: all_methods()[name] for name in ("EntropySGD-0", "TraceSAM-0", "Random-0", "Late-0", "Every-0")}
METHODS = {"sam": SAM(rho=0.3), "drift": Drift(rho=0.3), "every-third": Every(3, Drift(rho=0.3))}
OPTIONS = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same empty folder on all ranks."""
    if not dist.is_initialized():
        return tmp_path
    agreed = [str(tmp_path)]
    dist.broadcast_object_list(agreed)
    return Path(agreed[0])


def build(wrapper, method, base, freeze_first=False):
    net = Net()
    if freeze_first:
        next(net.parameters()).requires_grad_(False)
    net = WRAPPERS[wrapper](net)
    return net, SharpnessAware(BASES[base](net.parameters()), method, net)


def save(net, opt, folder, options):
    state = {
        "net": get_model_state_dict(net, options=options),
        "opt": get_optimizer_state_dict(net, opt, options=options),
    }
    dcp.save(state, checkpoint_id=folder)


def load(net, opt, folder, options):
    state = {
        "net": get_model_state_dict(net, options=options),
        "opt": get_optimizer_state_dict(net, opt, options=options),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(net, state["net"], options=options)
    set_optimizer_state_dict(net, opt, state["opt"], options=options)


SAVED = ["sam, sharded", "every-third, sharded", *(f"drift, {options}" for options in OPTIONS)]


@grid("wrapper, saved, base", WRAPPERS, SAVED, BASES)
def test_a_resumed_run_ends_in_the_same_bits(wrapper, saved, base, folder):
    batches, (method, options) = digits(steps=6), saved.split(", ")
    net, opt = build(wrapper, METHODS[method], base)
    train(opt, net, batches[:3])
    with unchanged(net, opt):
        save(net, opt, folder, OPTIONS[options])
    train(opt, net, batches[3:])

    again, opt_again = build(wrapper, METHODS[method], base)
    with torch.no_grad():
        for p in again.parameters():
            p.add_(1.0)
    load(again, opt_again, folder, OPTIONS[options])
    assert opt_again.steps == 3
    train(opt_again, again, batches[3:])

    assert_ranks_agree(again)
    assert_identical(whole(again), whole(net))
    assert_identical(tensors_in(opt_again.state_dict()), tensors_in(opt.state_dict()))


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
@pytest.mark.parametrize("method", [*REMEMBERING, *BY_THE_STEP])
def test_every_method_with_a_state_resumes(method, wrapper):
    """Memory, or draws and phases by the number of the step. Without either all methods are SAM, tested above."""
    resumes(wrapper, {**REMEMBERING, **BY_THE_STEP}[method])


def resumes(wrapper, method):
    """In memory: what a checkpoint holds is copied into the tensors of a fresh state, as loading a file does."""
    batches = digits(steps=5)
    net, opt = build(wrapper, method, "adamw")
    train_any(opt, net, batches[:3])
    saved = copy.deepcopy((get_model_state_dict(net), get_optimizer_state_dict(net, opt)))
    train_any(opt, net, batches[3:])

    again, opt_again = build(wrapper, method, "adamw")
    fresh = get_model_state_dict(again), get_optimizer_state_dict(again, opt_again)
    set_model_state_dict(again, filled(fresh[0], saved[0]))
    set_optimizer_state_dict(again, opt_again, filled(fresh[1], saved[1]))
    train_any(opt_again, again, batches[3:])
    assert_identical(whole(again), whole(net))


def filled(fresh, saved):
    """`fresh` with the values of `saved`; its tensors stay where they are and are written to."""
    if isinstance(fresh, torch.Tensor):
        with torch.no_grad():
            return fresh.detach().copy_(saved)
    if isinstance(fresh, dict):
        assert fresh.keys() == saved.keys()
        return {key: filled(value, saved[key]) for key, value in fresh.items()}
    if isinstance(fresh, list):
        return [filled(a, b) for a, b in zip(fresh, saved, strict=True)]
    return saved


@grid("options, wrapper", OPTIONS, WRAPPERS)
def test_memory_survives_when_the_first_parameter_is_frozen(options, wrapper, folder):
    """Fine-tuning. Checkpoints leave out the state of frozen parameters: nothing of ours may hide there."""
    batches = digits(steps=4)
    net, opt = build(wrapper, Drift(rho=0.3), "sgd", freeze_first=True)
    train(opt, net, batches[:2])
    save(net, opt, folder, OPTIONS[options])
    train(opt, net, batches[2:])

    again, opt_again = build(wrapper, Drift(rho=0.3), "sgd", freeze_first=True)
    load(again, opt_again, folder, OPTIONS[options])
    train(opt_again, again, batches[2:])
    assert_identical(whole(again), whole(net))


@pytest.mark.parametrize("base", BASES)
def test_a_checkpoint_of_two_replicas_goes_on_sharded(base, folder):
    """Saved under DDP, resumed under FSDP2: the method's memory is resharded with everything else."""
    batches = digits(steps=5)
    net, opt = build("ddp", Drift(rho=0.3), base)
    train(opt, net, batches[:3])
    save(net, opt, folder, OPTIONS["sharded"])
    train(opt, net, batches[3:])

    again, opt_again = build("fsdp2", Drift(rho=0.3), base)
    load(again, opt_again, folder, OPTIONS["sharded"])
    train(opt_again, again, batches[3:])
    for a, b in zip(whole(again), whole(net), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


@grid("base, wrapper", BASES, WRAPPERS)
def test_asking_for_the_state_before_the_first_step_changes_no_weight(base, wrapper):
    """Checkpointing makes state by a step at learning rate zero; that is not a step of the training."""
    net, opt = build(wrapper, Drift(rho=0.3), base)
    before = whole(net)
    state: Any = get_optimizer_state_dict(net, opt)
    assert opt.steps == 0
    assert all("steppe.mean" in entry for entry in state["state"].values())
    assert_identical(whole(net), before)
    train(opt, net, digits(steps=2))
    assert opt.steps == 2


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_several_bases_resume(wrapper, folder):
    """Matrices with SGD, the rest with AdamW, as Muon's users have it."""
    batches = digits(steps=5)

    def build_two():
        net = WRAPPERS[wrapper](Net())
        matrices, rest = ([p for p in net.parameters() if (p.dim() == 2) == wanted] for wanted in (True, False))
        return net, SharpnessAware([BASES["sgd"](matrices), BASES["adamw"](rest)], Drift(rho=0.3), net)

    net, opt = build_two()
    train(opt, net, batches[:3])
    with unchanged(net, opt):
        save(net, opt, folder, OPTIONS["sharded"])
    train(opt, net, batches[3:])
    again, opt_again = build_two()
    load(again, opt_again, folder, OPTIONS["sharded"])
    train(opt_again, again, batches[3:])
    assert_ranks_agree(again)
    assert_identical(whole(again), whole(net))
    assert_identical(tensors_in(opt_again.state_dict()), tensors_in(opt.state_dict()))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_checkpoint_of_the_plain_base_can_be_taken_up(wrapper, folder):
    """A run that turns sharpness-aware half-way: momentum goes on, memory begins."""
    batches = digits(steps=4)
    net, opt = build(wrapper, GSAM(rho=0.3), "sgd")
    train(opt, net, batches[:2])
    plain: Any = get_optimizer_state_dict(net, opt.base)
    momentum = tensors_in({k: v["momentum_buffer"] for k, v in plain["state"].items()})

    again, opt_again = build(wrapper, Drift(rho=0.3), "sgd")
    set_optimizer_state_dict(again, opt_again, plain)
    now: Any = get_optimizer_state_dict(again, opt_again)["state"]
    assert_identical(tensors_in({k: v["momentum_buffer"] for k, v in now.items()}), momentum)
    train(opt_again, again, batches[2:])
    assert_ranks_agree(again)
