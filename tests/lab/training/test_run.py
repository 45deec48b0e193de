"""The training loop does what a loop typed by hand does, for every method, alone or in turns."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import steppe
from helpers.image_excerpt import inputs_of
from steppe.lab.data import prepare
from steppe.lab.models import build
from steppe.lab.recipe.method_text import canonical_of
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.batches import Batches, data_for, seed_for
from steppe.lab.training.final_curvature import Measuring
from steppe.lab.training.round_robin import train_round_robin
from steppe.lab.training.run import Run
from steppe.methods.registry import own_methods as known_methods
from steppe.methods.registry import with_defaults

SHORT = Recipe(base="sgd", lr=0.1, momentum=0.9, batch=64, epochs=2, share=0.25, schedule="cosine", seed=1)


def trained(recipe: Recipe, **options) -> Any:
    run = Run(recipe, **options)
    for _ in run.train():
        pass
    return run


def weights(run: Run) -> list[torch.Tensor]:
    return [t.clone() for t in run.net.state_dict().values()]


def assert_same(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_run_equals_a_training_loop_written_by_hand():
    recipe = replace(SHORT, method="sam:rho=0.1", clip=0.5, weight_decay=1e-3)
    run = trained(recipe)
    data = data_for(recipe)
    torch.manual_seed(seed_for(1, "weights"))
    model = build("digits-mlp", (1, 8, 8), 10)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    optimizer = steppe.SharpnessAware(base, steppe.SAM(rho=0.1), model=model)
    step = 0
    for epoch in (1, 2):
        total = 0.0
        order = torch.randperm(359, generator=torch.Generator().manual_seed(seed_for(1, "main", "order", epoch)))
        model.train()
        for rows in order[:320].split(64):
            x, y = prepare(inputs_of(data.train)[rows], data), data.train.targets[rows]
            base.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * step / 10)) / 2
            loss: Any = optimizer.gradient(lambda x=x, y=y: F.cross_entropy(model(x), y))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            total += float(loss)
            step += 1
        assert run.record["epochs"][epoch - 1]["train_loss"] == total / 5
    assert_same(weights(run), list(model.state_dict().values()))
    model.eval()
    with torch.no_grad():
        logits = model(prepare(inputs_of(data.test), data))
    assert run.record["final"]["test_accuracy"] == (logits.argmax(1) == data.test.targets).double().mean().item()
    assert run.record["final"]["test_loss"] == pytest.approx(
        F.cross_entropy(logits, data.test.targets).item(), rel=1e-6
    )
    assert run.record["epochs"][1]["gradients"] == 20 and run.record["epochs"][1]["lr"] == base.param_groups[0]["lr"]


def test_the_plain_method_equals_torch_alone():
    recipe = replace(SHORT, method="plain", base="adam", lr=1e-3, momentum=0.0, schedule="constant", epochs=1)
    run = trained(recipe)
    torch.manual_seed(seed_for(1, "weights"))
    model = build("digits-mlp", (1, 8, 8), 10)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y, _ in Batches(recipe, data_for(recipe), frozenset(), torch.device("cpu"), 0, 1).of_epoch(1):
        adam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        adam.step()
    assert_same(weights(run), list(model.state_dict().values()))


@pytest.mark.parametrize("cls", known_methods(), ids=lambda cls: cls.__name__)
def test_every_method_trains_at_its_cost(cls):
    method = with_defaults(cls)
    functions = any(callable(v) and not isinstance(v, steppe.Method) for v in vars(method).values())
    text = cls.__name__.lower() if functions else canonical_of(method)
    recipe = replace(SHORT, method=text, epochs=1, lr=0.01, momentum=0.0, schedule="constant")
    run, passes = Run(recipe), []
    run.net.register_forward_pre_hook(lambda net, _: passes.append(net.training))
    for _ in run.train():
        pass
    record: Any = run.record
    assert record["status"] == "done", record["verdict"]
    assert all(t.isfinite().all() for t in weights(run))
    assert record["final"]["gradients"] == sum(passes)
    known = {
        "SASAM": 3 * 5 - 1, "SASGD": 2 * 5 - 1, "SSAM": 2 * 5 + 16, "Every": 5 + 2, "LookSAM": 6, "Late": 5 + 3,
        "Random": 5 + 2,
        "XSAM": 2 * 5 + 21,
    }  # fmt: skip
    if cls.__name__ in known:
        assert record["final"]["gradients"] == known[cls.__name__]
    elif len({method.phase(step) for step in range(5)}) == 1:  # all steps do the same: none is cheaper or dearer
        assert record["final"]["gradients"] == 5 * method.cost


def test_a_start_given_as_a_share_of_training_becomes_a_step():
    """Of 2 epochs of 5 steps, the last 0.3: three steps of two looks each."""
    run = trained(replace(SHORT, method="late:method=(sam:rho=0.1),start=0.7", epochs=2))
    assert run.optimizer.method == steppe.Late(steppe.SAM(rho=0.1), start=7)
    assert run.record["method"]["settings"]["start"] == 0.7
    assert run.record["final"]["gradients"] == 10 + 3


def test_runs_in_round_robin_equal_separate_runs():
    """With dropout, whose masks come from the random state that they share."""
    recipes = [replace(SHORT, method=method, model="tests_lab_dropout:net") for method in ("plain", "gsam", "gam")]
    alone = [trained(recipe) for recipe in recipes]
    together = [Run(recipe) for recipe in recipes]
    train_round_robin(together)
    for one, other in zip(alone, together, strict=True):
        assert_same(weights(one), weights(other))
        a, b = one.record["epochs"][-1], other.record["epochs"][-1]
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


@pytest.mark.parametrize("method", ["plain", "sam", "gam:period=2"])
def test_a_run_is_freed_without_garbage_collection(method):
    """Without Python's search for circles, which comes too late for a GPU's memory."""
    gc.collect()
    gc.disable()
    try:
        run = trained(replace(SHORT, method=method, clip=1.0))
        gone = weakref.ref(run), weakref.ref(run.net), weakref.ref(run.optimizer)
        del run
        assert [ref() for ref in gone] == [None, None, None]
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _own_model():
    import sys
    import types

    module = types.ModuleType("tests_lab_dropout")

    def net(input_shape, classes):
        from torch import nn

        hidden = [nn.Linear(64, 16), nn.Softplus(), nn.Dropout(0.2)]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(16, classes))

    module.net = net  # type: ignore[attr-defined]
    sys.modules["tests_lab_dropout"] = module
    yield
    del sys.modules["tests_lab_dropout"]


METHODS_WITH_MEMORY = ["plain", "gam:period=2", "ssam:every=3,samples=4", "looksam:k=3", "sasam", "fsam"]


@pytest.mark.parametrize("method", METHODS_WITH_MEMORY)
@pytest.mark.parametrize("stop", [4, 7, 10])
def test_a_resumed_run_ends_with_the_same_bits(method, stop, tmp_path):
    recipe = replace(SHORT, method=method, precision="fp16" if method == "plain" else "float32")
    if method == "sasam":
        recipe = replace(recipe, schedule="constant", momentum=0.0, lr=0.01)
    stopped = Run(recipe, tmp_path)
    steps = stopped.train()
    for _ in range(stop):
        next(steps)
    done = len(stopped.record["epochs"])
    steps.close()
    again = Run(recipe, tmp_path)
    assert len(again.record["epochs"]) == done == (stop - 1) // 5
    for _ in again.train():
        pass
    whole = trained(recipe)
    assert_same(weights(again), weights(whole))
    for one, other in zip(again.record["epochs"], whole.record["epochs"], strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_all_methods_of_a_seed_start_alike_and_see_the_same_batches():
    one, other = Run(replace(SHORT, method="sam")), Run(replace(SHORT, method="gam"))
    assert_same(weights(one), weights(other))
    for (x, y, none), (x2, y2, auxiliary) in zip(one.batches.of_epoch(3), other.batches.of_epoch(3), strict=True):
        assert torch.equal(x, x2) and torch.equal(y, y2) and none is None
        assert not torch.equal(auxiliary[0], x)
    other_seed = weights(Run(replace(SHORT, seed=2)))
    assert any(not torch.equal(a, b) for a, b in zip(weights(one), other_seed, strict=True))


def batches(recipe=SHORT, auxiliary=False, rank=0, ranks=1, epoch=1):
    needs = frozenset({"auxiliary"} if auxiliary else ())
    return list(Batches(recipe, data_for(recipe), needs, torch.device("cpu"), rank, ranks).of_epoch(epoch))


def test_an_epoch_shows_every_example_once():
    recipe = replace(SHORT, batch=359, share=0.25)
    ((x, _, _),) = batches(recipe)
    stored = prepare(inputs_of(data_for(recipe).train), data_for(recipe))
    assert sorted(map(tuple, x.flatten(1).tolist())) == sorted(map(tuple, stored.flatten(1).tolist()))
    assert not torch.equal(batches(epoch=1)[0][0], batches(epoch=2)[0][0])


def test_auxiliary_batches():
    fresh, fixed, previous = (
        batches(replace(SHORT, auxiliary=kind), auxiliary=True) for kind in ("fresh", "fixed", "previous")
    )
    assert all(torch.equal(second[0], fixed[0][2][0]) for *_, second in fixed)
    again = batches(replace(SHORT, auxiliary="fixed"), auxiliary=True, epoch=2)
    assert torch.equal(again[0][2][0], fixed[0][2][0])
    for (x, _, _), (*_, second) in zip([previous[0], *previous], previous, strict=False):
        assert torch.equal(x, second[0])
    assert len({second[0].sum().item() for *_, second in fresh}) == len(fresh)


def test_ranks_share_each_batch():
    for (x, y, _), (x0, y0, _), (x1, y1, _) in zip(batches(), batches(ranks=2), batches(rank=1, ranks=2), strict=True):
        assert torch.equal(x, torch.cat([x0, x1])) and torch.equal(y, torch.cat([y0, y1]))


def test_augmentation_and_mixup_are_drawn_from_the_seed():
    recipe = replace(SHORT, augmentation="crop=1+flip", mixup=0.2)
    (x, y, _), (x2, y2, _) = batches(recipe)[0], batches(recipe)[0]
    assert torch.equal(x, x2) and torch.equal(y, y2) and y.shape == (64, 10)
    assert not torch.equal(x, batches(replace(recipe, mixup=0.0))[0][0])
    run = trained(replace(recipe, epochs=1))
    assert run.record["status"] == "done" and 0 < run.record["final"]["train_accuracy"] < 1


def test_held_out_data_comes_from_the_training_data():
    whole, part = data_for(Recipe()), data_for(Recipe(hold_out=0.25))
    assert (len(part.train), len(part.test)) == (1437 - 359, 359)
    both = torch.cat([inputs_of(part.train), inputs_of(part.test)]).flatten(1).tolist()
    assert sorted(map(tuple, both)) == sorted(map(tuple, inputs_of(whole.train).flatten(1).tolist()))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16-fixed", "tf32", "float64"])
def test_precisions(precision):
    """Each agrees with float32 as far as its digits go; TF32 exists on GPUs alone."""
    exact = trained(replace(SHORT, method="sam", epochs=1))
    run = trained(replace(SHORT, method="sam", epochs=1, precision=precision, clip=10.0))
    tolerance = {"bf16": 0.05, "fp16": 0.01, "fp16-fixed": 0.01, "tf32": 0.0, "float64": 1e-4}[precision]
    loss, expected = run.record["final"]["train_loss"], exact.record["final"]["train_loss"]
    assert loss == pytest.approx(expected, rel=tolerance, abs=0)
    assert (loss == expected) == (precision == "tf32")
    assert next(run.net.parameters()).dtype == (torch.float64 if precision == "float64" else torch.float32)
    assert (run.scaler is not None) == precision.startswith("fp16")


def test_divergence_is_detected_and_explained():
    recipe = replace(SHORT, method="sam:rho=0.1", lr=1e30, momentum=0.0, schedule="constant", model="mlp-6")
    run = trained(recipe)
    fine, model = 0, Run(recipe)
    for x, y, _ in model.batches.of_epoch(1):
        if not F.cross_entropy(model.net(x), y).isfinite():
            break
        model.step(x, y)
        fine += 1
    assert run.record["status"] == "diverged" and len(run.record["epochs"]) == 1
    assert run.record["verdict"] == f"loss became NaN in epoch 1, step {fine + 1}: lower lr or rho"
    assert 0 < fine < 5


def test_no_step_synchronises_with_the_device(monkeypatch):
    """Under fake tensors a value that is read raises."""
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_: self)  # which fake parameters do not survive
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for method in ("plain", "gsam", "gam", "ssam"):
            run = Run(replace(SHORT, method=method, clip=1.0), data=data_for(SHORT))
            x, y = (mode.from_tensor(t) for t in (torch.zeros(64, 1, 8, 8), torch.zeros(64, dtype=torch.int64)))
            run.step(x, y, (x, y) if "auxiliary" in run.optimizer.method.needs else None)
            assert run.optimizer.steps == 1


def test_a_logger_gets_each_epoch_and_is_closed():
    said = []

    class Logger:
        def add_scalar(self, name, value, step):
            said.append((name, value, step))

        def close(self):
            said.append("closed")

    run = trained(SHORT, logger=Logger())
    last = run.record["epochs"][1]
    names = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr")
    assert said[5:] == [*((name, last[name], 2) for name in names), "closed"]


def test_a_compiled_run_trains_the_same(monkeypatch):
    """Compiled it is: `nn.Module.compile` compiles nothing of an `nn.Sequential` of torch's own layers."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    eager, compiled = (trained(replace(SHORT, method="sam", epochs=2, compile=on)) for on in (False, True))
    assert counter.frame_count == 1  # once, whatever the looks, epochs and evaluations
    for a, b in zip(weights(eager), weights(compiled), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert compiled.net.state_dict().keys() == eager.net.state_dict().keys()


def test_curvature_of_a_compiled_run_can_be_measured(monkeypatch):
    """Curvature differentiates twice, which a compiled model cannot."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    few = Measuring(samples=20, probes=2, dimension=4, products=168, points=0)
    run = trained(replace(SHORT, method="sam", epochs=1, compile=True), measure=few)
    assert run.record["curvature"]["top"]["value"] > 0


def test_metrics_are_recorded():
    gam = trained(replace(SHORT, method="gam")).record["epochs"][1]["metrics"]
    assert len(gam["gamma"]) == 2 and all(math.isfinite(value) for value in gam["gamma"])
    assert set(trained(replace(SHORT, method="gsam")).record["epochs"][0]["metrics"]) == {"surrogate_gap", "cos"}
