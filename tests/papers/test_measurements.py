"""What the papers' runs need beyond the lab: data in [0, 1], weights to start from, measurements on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helpers.image_excerpt import cifar10
from steppe.curvature import Hessian, Objective, eigenvalues, frobenius_squared, plane, surrogate_gap
from steppe.curvature.trace import FEWEST_PRODUCTS
from steppe.lab.data import load, prepare
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.checkpoints import write_weights
from steppe.lab.training.round_robin import train_round_robin
from steppe.papers import pretrained, sets
from steppe.papers.epoch_measurements import Watch, WatchedRun, examples_of
from steppe.papers.experiment import SETS
from steppe.papers.final_measurements import AtOwnRadius, Landscape, LocalExtrema, Shifted
from steppe.papers.registry import find
from steppe.support.errors import UserError

SMOKE = Recipe(data=f"{SETS}:smoke_grey", model="mlp-6", model_settings={"hidden": 4}, batch=4, epochs=2)


def watched(watch: Watch | None, recipe: Recipe = SMOKE, measure=None) -> Any:
    run = WatchedRun(recipe, measure=measure, watch=watch)
    train_round_robin([run])
    return run


def test_inputs_of_s0_are_in_0_1(monkeypatch):
    monkeypatch.setattr(sets, "load", lambda name: cifar10())
    data = sets.cifar10()
    x, _ = data.test.take(torch.arange(20))
    assert torch.equal(prepare(x, data), x.float() / 255)
    assert not torch.equal(prepare(x, cifar10()), x.float() / 255)


def test_smoke_data_is_real_and_has_the_shapes():
    shapes = {name: load(f"{SETS}:smoke_{name}").input_shape for name in ("grey", "colour", "colour_100", "folder")}
    assert shapes == {"grey": (1, 28, 28), "colour": (3, 32, 32), "colour_100": (3, 32, 32), "folder": (3, 224, 224)}
    assert load(f"{SETS}:smoke_colour_100").classes == 100
    digits, grey = load("digits"), sets.smoke_grey()
    assert torch.equal(grey.train.targets, digits.train.targets[:8])


def test_a_missing_folder_of_images_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"flowers is not in .*: put train/CLASS"):
        load(f"{SETS}:flowers")


# Measuring on the way


def test_epochs_to_measure_after():
    assert [e for e in range(1, 201) if Watch(top=50, parts=2).after(e, 200)] == [100, 200]
    assert all(Watch(frobenius=True).after(e, 20) for e in range(1, 21))
    assert [e for e in range(1, 3) if Watch(parts=5).after(e, 2)] == [1, 2]


def test_frobenius_norm_after_every_epoch():
    run = watched(Watch(frobenius=True, samples=8))
    found = [entry["frobenius"]["value"] for entry in run.record["epochs"]]
    hessian = Hessian(Objective(run.net, cross_entropy, examples_of(run, 8)))
    again = frobenius_squared(hessian, method="hutchinson", max_matvecs=200, progress=False)
    assert len(found) == 2 and found[-1] == again.value and found[0] != found[1]


def test_top_eigenvalues_at_the_end_alone():
    run = watched(Watch(top=2, parts=1, samples=8, products=FEWEST_PRODUCTS))
    first, last = run.record["epochs"]
    assert "top_values" not in first
    hessian = Hessian(Objective(run.net, cross_entropy, examples_of(run, 8)))
    assert last["top_values"][0] == pytest.approx(float(eigenvalues(hessian, 1).values[0]), rel=0.02)


def test_measuring_during_training_changes_no_weight():
    one, other = watched(Watch(frobenius=True, samples=8)), watched(None)
    assert all(torch.equal(a, b) for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True))


def test_gap_at_the_methods_own_radius():
    recipe = replace(SMOKE, method="gsam:rho=0.2,alpha=0.1")
    measure = AtOwnRadius(samples=8, probes=2, dimension=4, products=FEWEST_PRODUCTS)
    found = watched(None, recipe, measure)
    curvature = found.record["curvature"]
    gap = surrogate_gap(Objective(found.net, cross_entropy, measure.examples(found)), 0.2).gap
    assert curvature["own_gap"] == {"value": gap, "rho": 0.2}
    assert curvature["from_gap"]["value"] == 2 * gap / 0.2**2


def test_a_landscape_is_that_of_the_end():
    measure = Landscape(samples=8, points=3)
    run = watched(None, measure=measure)
    found = run.record["curvature"]
    again = plane(Objective(run.net, cross_entropy, measure.examples(run)), reach=1.0, points=3, progress=False)
    assert found == {"landscape": {"axis": [-1.0, 0.0, 1.0], "loss": again.losses.tolist()}}


@pytest.mark.parametrize("kind", [AtOwnRadius, Watch])
def test_too_few_products_are_refused_before_a_training(kind):
    with pytest.raises(ValueError, match="products must be at least 168, got 64"):
        kind(products=64)


def test_measurements_during_and_after_training_are_both_required():
    experiment = find("s2/fig3")
    both = {"curvature": {"landscape": {}}, "epochs": [{}, {"top_values": [1.0]}]}
    assert experiment.measured_in(both)
    assert not experiment.measured_in({**both, "curvature": None})
    assert not experiment.measured_in({**both, "epochs": [{}, {}]})
    kept = {"curvature": {"landscape": {}}, "epochs": {}, "metrics": {"top_values": [None, [1.0]]}}
    assert experiment.measured_in(kept) and not experiment.measured_in({**kept, "metrics": {}})


def test_local_minima_are_counted_by_direction():
    found = watched(None, measure=LocalExtrema(samples=8, directions=3)).record["curvature"]
    assert len(found["minima"]["counts"]) == 3
    assert found["minima"]["value"] == pytest.approx(sum(found["minima"]["counts"]) / 3)


def test_corrupted_images(monkeypatch):
    """With a corruption that changes nothing, in and out of distribution are the same."""
    from steppe.papers import final_measurements as watch

    monkeypatch.setattr(watch, "corrupt", lambda images, kind, severity: images)
    recipe = replace(SMOKE, data=f"{SETS}:smoke_colour")
    run = watched(None, recipe, Shifted(samples=8, products=FEWEST_PRODUCTS))
    found = run.record["curvature"]
    assert found["shifted_accuracy"]["value"] == run.record["final"]["test_accuracy"]
    assert found["shifted_top"] == found["top"] and found["shifted_trace"] == found["trace"]
    assert found["shifted_accuracy"]["images"] == len(run.data.test)


def test_a_part_of_the_images_is_the_first_part(monkeypatch):
    from steppe.papers import final_measurements as watch

    seen = []
    monkeypatch.setattr(watch, "corrupt", lambda images, kind, severity: seen.append(images) or images)
    run = watched(
        None, replace(SMOKE, data=f"{SETS}:smoke_colour"), Shifted(samples=8, images=3, products=FEWEST_PRODUCTS)
    )
    assert run.record["curvature"]["shifted_accuracy"]["images"] == 3
    assert all(torch.equal(images, run.data.test.inputs[:3]) for images in seen) and len(seen) == 2


def test_small_scale_may_measure_less():
    experiment = find("s4/vgg-19")
    assert experiment.measuring_at("small") == Shifted(samples=170, images=1000)
    assert experiment.measuring_at("full") == Shifted()
    assert find("s1/fig4-cifar").measuring_at("small") == AtOwnRadius()


# Fine-tuning


def net(name, shape, classes, **settings) -> Any:
    assert (name, tuple(shape)) == ("timm:tiny", (3, 224, 224)) and settings in ({}, {"pretrained": True})
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, classes))


def test_pretrained_weights_are_loaded_except_for_the_last_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "build_model", net)
    monkeypatch.setenv("STEPPE_WEIGHTS", str(tmp_path))
    old = net("timm:tiny", (3, 224, 224), 7)
    write_weights(old.state_dict(), tmp_path, "before")
    made: Any = pretrained.build((3, 32, 32), 3, "tiny", "before")
    assert isinstance(made[0], nn.Upsample) and made(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert torch.equal(made[1][2].weight, old[2].weight) and made[1][3].weight.shape == (3, 5)
    plain: Any = pretrained.build((3, 224, 224), 3, "tiny")
    assert isinstance(plain[0], nn.AdaptiveAvgPool2d)
    with pytest.raises(UserError, match="no weights after in"):
        pretrained.build((3, 32, 32), 3, "tiny", "after")
