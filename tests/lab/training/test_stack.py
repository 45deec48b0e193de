"""Runs that differ only in their seed, trained as one net: each is what it is alone, up to the rounding of kernels."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steppe.lab.models import build
from steppe.lab.models.stacked import StackedNet, stackable
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.records import RecordWarning, read_records
from steppe.lab.runner.jobs import Job, Place, groups_of
from steppe.lab.runner.local import train_jobs
from steppe.lab.training import stack as stack_module
from steppe.lab.training.final_curvature import Measuring
from steppe.lab.training.round_robin import train_round_robin
from steppe.lab.training.run import Run
from steppe.lab.training.stack import Stack, stacked

DIGITS = {"data": "digits", "epochs": 3, "batch": 64}
SGD = {"base": "sgd", "lr": 0.1, "momentum": 0.9, "schedule": "cosine"}
RECIPES = {
    "an average, wrong labels, a schedule": {"method": "sam:rho=0.1", "average": "ema:0.9", "label_noise": 0.4, **SGD},
    "held-out examples": {"method": "gapsam:period=3", "auxiliary": "held-out:100"},
    "a learned radius, batch norm": {
        "method": "gam:T=2,reference=weights,discrepancy=cosine,directions=unit,period=2",
        "auxiliary": "previous", "model": "mlp-3",
    },
    "convolutions, an average": {"model": "cnn-3", "method": "looksam:k=2", "average": "swa:0.5", "epochs": 2},
    "two batches": {"method": "sampa", "auxiliary": "fresh", "base": "adamw", "weight_decay": 0.1},
    "one second batch": {"method": "gapsam", "auxiliary": "fixed", "label_smoothing": 0.1, "warmup": 5},
    "late": {"method": "late:start=0.5,method=(asam)", **SGD},
}  # fmt: skip


def recipes(count=3, **fields):
    return [Recipe.of({**DIGITS, "precision": "float64", **fields, "seed": seed}) for seed in range(count)]


def ends(runs):
    return [[t.clone() for t in run.net.state_dict().values()] for run in runs]


def equal(a, b):
    return all(torch.equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


LONG = ("a learned radius, batch norm", "convolutions, an average")  # what only CI runs
CASES = [pytest.param(v, id=k, marks=[pytest.mark.slow] if k in LONG else []) for k, v in RECIPES.items()]


@pytest.mark.parametrize("fields", CASES)
def test_each_run_is_what_it_is_alone(fields):
    alone, together = ([Run(recipe) for recipe in recipes(**fields)] for _ in range(2))
    train_round_robin(alone)
    train_round_robin([Stack(together)])
    for one, other in zip(alone, together, strict=True):
        assert len(one.record["epochs"]) == len(other.record["epochs"]) == one.recipe.epochs
        for mine, theirs in zip(one.record["epochs"], other.record["epochs"], strict=True):
            assert mine.keys() == theirs.keys()
            for name in mine.keys() - {"seconds", "metrics", "averaged"}:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-7), name
            assert mine.get("averaged", {}) == pytest.approx(theirs.get("averaged", {}), rel=1e-7)
            assert mine["metrics"].keys() == theirs["metrics"].keys()
            for name, value in mine["metrics"].items():
                assert value == pytest.approx(theirs["metrics"][name], rel=1e-4), name
        for a, b in zip(one.net.state_dict().values(), other.net.state_dict().values(), strict=True):
            assert torch.allclose(a, b, rtol=1e-7, atol=1e-8)
        if one.average is not None and other.average is not None:
            for a, b in zip(*(run.average.model.state_dict().values() for run in (one, other)), strict=True):  # pyright: ignore[reportOptionalMemberAccess]
                assert torch.allclose(a, b, rtol=1e-7, atol=1e-8)
        assert set(one.record["final"] or ()) == set(other.record["final"] or ())
        assert other.record["environment"]["stacked"] == 3


@pytest.mark.parametrize("model", ["digits-mlp", "mlp-3", "cnn-3"])
def test_on_a_cpu_the_number_in_a_stack_changes_no_bit(model):
    found = {}
    for count in (1, 2, 5):
        runs = [Run(recipe) for recipe in recipes(count, model=model, method="gsam", precision="float32", epochs=1)]
        train_round_robin([Stack(runs)])
        found[count] = ends(runs)
    assert equal(found[1], found[5][:1]) and equal(found[2], found[5][:2])


@pytest.mark.parametrize(("name", "shape"), [("mlp-6", (1, 28, 28)), ("cnn-5", (3, 32, 32)), ("mlp-3", (1, 8, 8))])
def test_a_stacked_net_computes_what_its_nets_compute(name, shape):
    torch.manual_seed(0)
    nets = [build(name, shape, 10).double() for _ in range(2)]
    together = StackedNet(nets)
    x, y = torch.rand(2, 12, *shape, dtype=torch.float64), torch.randint(10, (2, 12))
    out = together(x)
    F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(2, -1).mean(1).sum().backward()
    for member, net in enumerate(nets):
        F.cross_entropy(net(x[member]), y[member]).backward()
        grad = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        assert together.weights.grad is not None
        assert torch.allclose(together.weights.grad[member], grad, rtol=1e-9, atol=1e-12)
    for module in (together, *nets):  # the forward above has updated the statistics
        module.eval()
    for member, net in enumerate(nets):
        assert torch.allclose(together(x)[member], net(x[member]), rtol=1e-10)
        assert torch.allclose(together(together.shared(x[0]))[member], net(x[0]), rtol=1e-10)


def test_nets_that_have_no_stacked_form_are_told_apart():
    assert not stackable(build("resnet-18", (3, 32, 32), 10), (3, 32, 32))
    assert not stackable(build("cnn-14", (3, 32, 32), 10), (3, 32, 32))  # its patches would take too much memory
    assert not stackable(nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout()), (1, 8, 8))
    with pytest.raises(ValueError, match="nets with Dropout"):
        StackedNet([nn.Sequential(nn.Dropout())])


def test_only_runs_that_gain_are_stacked():
    together = [Run(recipe) for recipe in recipes(2, method="sam")]
    others = [Run(recipe) for recipe in recipes(2, method="sam", label_noise=0.2)]
    drawing = [Run(recipe) for recipe in recipes(2, method="arwp")]
    clipped = [Run(recipe) for recipe in recipes(2, clip=1.0)]
    alone = Run(recipes(1, model="cnn-3")[0])
    found = stacked([*together, *others, *drawing, *clipped, alone])
    assert [one.runs for one in found if isinstance(one, Stack)] == [together, others]
    assert [one for one in found if isinstance(one, Run)] == [*drawing, *clipped, alone]


def test_a_stopped_stack_goes_on_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(stack_module, "PAUSE", 0.0)
    fields = {"method": "gapsam:period=4", "auxiliary": "held-out:100", "average": "ema:0.9", **SGD}
    whole = [Run(recipe) for recipe in recipes(**fields)]
    train_round_robin([Stack(whole)])
    first = Stack([Run(recipe, tmp_path) for recipe in recipes(**fields)])
    list(islice(first.train(), 2 * first.batches.steps + 3))
    again = [Run(recipe, tmp_path) for recipe in recipes(**fields)]
    second = Stack(again)
    assert [len(run.record["epochs"]) for run in again] == [2, 2, 2]
    train_round_robin([second])
    assert equal(ends(whole), ends(again))
    for one, other in zip(whole, again, strict=True):
        names = ("train_loss", "test_loss", "gradients", "averaged", "metrics")
        kept = [[{name: e.get(name) for name in names} for e in run.record["epochs"]] for run in (one, other)]
        assert kept[0] == kept[1]
    assert not list(tmp_path.glob("*.ckpt")) and len(read_records(tmp_path)) == 3


def test_runs_of_another_stack_do_not_use_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(stack_module, "PAUSE", 0.0)
    first = Stack([Run(recipe, tmp_path) for recipe in recipes(3)])
    list(islice(first.train(), first.batches.steps + 1))
    swapped = recipes(3)[0], recipes(3)[2], recipes(3)[1]
    assert [run.record["epochs"] for run in Stack([Run(recipe, tmp_path) for recipe in swapped]).runs] == [[], [], []]


def test_a_member_that_diverges_leaves_the_others_alone():
    healthy = [Run(recipe) for recipe in recipes(3, method="sam")]
    train_round_robin([Stack(healthy)])
    runs = [Run(recipe) for recipe in recipes(3, method="sam")]
    ill = Stack(runs)
    with torch.no_grad():
        ill.net.weights[1, 0] = float("nan")
    train_round_robin([ill])
    assert [run.record["status"] for run in runs] == ["done", "diverged", "done"]
    assert len(runs[1].record["epochs"]) == 1 and "loss became NaN in epoch 1, step 1" in runs[1].record["verdict"]
    found = ends(runs)
    assert equal([found[0], found[2]], [ends(healthy)[0], ends(healthy)[2]])


def test_what_interrupts_the_measurements_does_not_cost_the_training(tmp_path):
    class Interrupted(Measuring):
        def __call__(self, run):
            if run.recipe.seed == 1:
                raise KeyboardInterrupt
            return {"seen": {"value": 1.0}}

    jobs = [Job(recipe) for recipe in recipes(3)]
    with pytest.raises(KeyboardInterrupt):
        train_jobs(jobs, Place(tmp_path, measuring=Interrupted()))
    steps = []

    class Measured(Interrupted):
        def __call__(self, run):
            return {"seen": {"value": 2.0}}

    class Counted(Run):
        def step(self, *args, **kwargs):
            steps.append(1)
            super().step(*args, **kwargs)

    records = train_jobs(jobs, Place(tmp_path, measuring=Measured()), make_run=Counted)
    assert not steps
    assert [record["curvature"] for record in records] == [{"seen": {"value": value}} for value in (1.0, 2.0, 2.0)]
    assert not list(tmp_path.glob("*.ckpt"))
    (whole,) = train_jobs(jobs[2:], Place(tmp_path / "whole"))
    assert records[2]["final"]["test_loss"] == whole["final"]["test_loss"]  # type: ignore[index]


def test_if_memory_is_too_small_fewer_are_trained_at_once(tmp_path, monkeypatch):
    train = Stack.train

    def small(self):
        if len(self.runs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        yield from train(self)

    monkeypatch.setattr(Stack, "train", small)
    jobs = [Job(recipe) for recipe in recipes(5, epochs=1)]
    with pytest.warns(RecordWarning) as seen:
        records = train_jobs(jobs, Place(tmp_path))
    too_many = "{} runs at once do not fit into the memory of cpu: going on with {}"
    assert [str(warning.message) for warning in seen] == [too_many.format(5, 3), too_many.format(3, 2)]
    assert [record["recipe"]["seed"] for record in records] == [0, 1, 2, 3, 4]
    assert all(record["status"] == "done" for record in records)
    monkeypatch.setattr(Stack, "train", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(torch.OutOfMemoryError):
        train_jobs([Job(recipes(1, epochs=2)[0])], Place(tmp_path))


def test_groups_leave_no_worker_without_work(tmp_path):
    jobs = [Job(replace(recipe, method=method)) for method in ("plain", "sam") for recipe in recipes(10)]
    place = Place(tmp_path)
    sizes = lambda **given: [len(g) for g in groups_of(jobs, replace(place, **given), given.pop("workers", 1))]  # noqa: E731
    assert [len(group) for group in groups_of(jobs, place, 2)] == [10, 10]
    assert [len(group) for group in groups_of(jobs, place, 6)] == [4, 4, 2, 4, 4, 2]
    assert sizes(stacked=3) == [3, 3, 3, 1] * 2
    assert sizes(stacked=1) == [1] * 20
    for group in groups_of(jobs, place, 6):
        assert len({replace(job.recipe, seed=0) for job in group}) == 1
    radii = [Job(replace(recipe, method=f"sam:rho={rho}")) for rho in (0.1, 0.2, 0.5) for recipe in recipes(2)]
    on_gpu = replace(place, device="cuda", stacked=4)
    assert [len(group) for group in groups_of(radii, on_gpu)] == [4, 2]  # two radii side by side, then the third
    assert [len(group) for group in groups_of(radii, replace(on_gpu, device="cpu"))] == [2, 2, 2]


@pytest.mark.cuda
@pytest.mark.parametrize("fields", RECIPES.values(), ids=RECIPES)
def test_on_a_gpu_a_recorded_stack_follows_the_runs_alone(fields):
    """In float64 for an epoch: on a GPU, too, only rounding differs."""
    few = {**fields, "epochs": 1} if "late" not in fields.get("method", "") else fields
    alone, together = ([Run(recipe, device="cuda") for recipe in recipes(**few)] for _ in range(2))
    train_round_robin(alone)
    one = Stack(together)
    train_round_robin([one])
    assert one._step.how.startswith("replayed")
    for a, b in zip(ends(alone), ends(together), strict=True):
        assert all(torch.allclose(x.double(), y.double(), rtol=1e-5, atol=1e-7) for x, y in zip(a, b, strict=True))


@pytest.mark.cuda
def test_on_a_gpu_a_stack_writes_its_weights_into_channels_last_nets():
    runs = [Run(recipe, device="cuda") for recipe in recipes(2, model="cnn-3", epochs=1, precision="float32")]
    made = Stack(runs)
    assert runs[0].net[1].weight.is_contiguous(memory_format=torch.channels_last)  # pyright: ignore[reportIndexIssue]
    copies = copy.deepcopy([run.net for run in runs])
    made.net.write_to([run.net for run in runs])
    for before, run in zip(copies, runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before.parameters(), run.net.parameters(), strict=True))
