"""Every table and figure is there, builds at every scale, and runs; the papers' numbers are typed right."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from steppe.lab.models import build
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.runner.jobs import Place
from steppe.papers.experiment import SCALES, Cell, Experiment, select
from steppe.papers.registry import claims, experiments, find, trends
from steppe.papers.run import Planned, run
from steppe.support.errors import UserError

ALL = list(experiments().values())


@pytest.mark.parametrize("experiment", ALL, ids=lambda e: e.name)
def test_builds_at_every_scale(experiment):
    for cell in experiment.cells:
        if cell.recipe is None:
            assert experiment.compute is not None
            continue
        recipes = {scale: experiment.recipe(cell, scale, seed=3) for scale in SCALES}
        assert {r.seed for r in recipes.values()} == {3}
        assert recipes["full"] == replace(cell.recipe, seed=3)
        assert recipes["small"].epochs == max(cell.recipe.epochs // experiment.shorter, 2)
        for r in recipes.values():
            r.build_method()
            assert "lr" not in r.build_method().needs or (r.schedule, r.warmup) == ("constant", 0)


def test_all_tables_and_figures_of_the_papers_are_there():
    wanted = {
        "s0": "table1 fig2 fig3 fig4 fig5 fig6 table1-theorem stability",
        "s1": "table1 table2 table3 table5 table6 fig3 fig4 fig5 fig6 fig4-cifar fig8-cifar fig9-cifar table6-cifar",
        "s2": "table1 table2 table3 table4 table5 table6 table7 fig2 fig3 fig5 fig6",
        "s3": "table2 fig1",
        "s4": "vgg-19 vit-small",
        "extra": "equal-cost frontier",
    }
    assert {f"{paper}/{name}" for paper, names in wanted.items() for name in names.split()} <= set(experiments())
    assert len(find("s0/table1").cells) == 11 * 6 + 3
    assert len(find("s2/table1").cells) == 5 * 4 * 4 * 2
    assert len(find("s4/vgg-19").cells) == 5 * 4 * 4


MODELS = sorted(
    {
        (c.recipe.model, c.recipe.model_settings, c.recipe.data.split(":")[-1])
        for e in ALL
        for c in e.cells
        if c.recipe is not None and not c.recipe.model.startswith(("timm:", "steppe."))
    }
)
SHAPES = {
    "mnist": (1, 28, 28), "fashion": (1, 28, 28), "imagenet": (3, 224, 224), "digits": (1, 8, 8), "text": (128,),
}  # fmt: skip


@pytest.mark.parametrize(("model", "settings", "data"), MODELS, ids=lambda v: str(v))
def test_full_size_models_can_be_made(model, settings, data):
    with torch.device("meta"):  # shapes alone, no memory
        made = build(model, SHAPES.get(data, (3, 32, 32)), 10, **dict(settings))
    assert sum(p.numel() for p in made.parameters()) > 1000


def bare(experiment: Experiment) -> Experiment:
    """Without measurements; with them, nets are larger at smoke scale."""
    return replace(experiment, measuring=None, watch=None)


def kind_of(recipe: Recipe) -> str:
    """What decides which code a run goes through: all of a recipe but the values of its numbers."""
    fields = recipe.as_dict()
    fields |= {name: fields[name] > 0 for name in ("momentum", "warmup", "mixup", "clip", "label_noise")}
    kept = {name: value for name, value in fields.items() if name not in ("lr", "weight_decay", "batch", "share")}
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?(?![-\w])", "#", str(kept))


def first_of_each_kind() -> dict[str, list[Cell]]:
    """By experiment, the cells that no cell before them stands for."""
    chosen: dict[str, list[Cell]] = {experiment.name: [] for experiment in ALL}
    seen: set[str] = set()
    for experiment in ALL:
        for cell in experiment.cells:
            kind = cell.name if cell.recipe is None else kind_of(bare(experiment).recipe(cell, "smoke"))
            again = set()
            if experiment.name == "extra/frontier" and cell.role != "base":
                again = {cell.name.split("/")[1]}  # each regime with its base, and each method in one regime
            if not {kind, *again} & seen:
                seen |= {kind, *again}
                chosen[experiment.name].append(cell)
    return {name: cells for name, cells in chosen.items() if cells}


CHOSEN = first_of_each_kind()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_smoke(name, tmp_path):
    """Every cell that differs from the others in more than the value of a number runs: a step or two."""
    experiment = bare(find(name))
    run(Planned(experiment, "smoke", [0], tuple(CHOSEN[name])), Place(tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == len(CHOSEN[name])
    assert not list(tmp_path.glob("*.ckpt"))


def on_small_images(experiment: Experiment) -> bool:
    return all(not experiment.recipe(cell, "smoke").data.endswith("folder") for cell in experiment.cells if cell.recipe)


MEASURED = {  # on large images it takes long: see test_imagenet_table.py
    (experiment.measuring_at("smoke"), experiment.watch_at("smoke")): experiment
    for experiment in reversed(ALL)
    if (experiment.measuring or experiment.watch) and on_small_images(experiment)
}


@pytest.mark.parametrize(
    "experiment",
    [pytest.param(e, id=e.name, marks=pytest.mark.slow if "vgg" in e.name else ()) for e in MEASURED.values()],
)
def test_smoke_with_measurements(experiment, tmp_path):
    planned = Planned(experiment, "smoke", [0], experiment.cells[:1])
    run(planned, Place(tmp_path, measuring=experiment.measuring_at("smoke")))
    (file,) = tmp_path.glob("*.json")
    assert experiment.measured_in(json.loads(file.read_text("utf-8")))


def test_smoke_keeps_what_matters():
    experiment = find("s2/table6")
    full = experiment.cell("noise-80/sam-gnam").recipe
    smoke = experiment.recipe(experiment.cell("noise-80/sam-gnam"), "smoke")
    same = ("method", "base", "lr", "momentum", "weight_decay", "schedule", "augmentation", "label_noise")
    assert [getattr(smoke, name) for name in same] == [getattr(full, name) for name in same]
    assert (smoke.epochs, smoke.batch, smoke.model) == (1, 4, "cnn-3")


def test_small_scale_stretches_everything_alike():
    experiment = find("s3/table2")
    small = experiment.recipe(experiment.cell("cifar10/sgd"), "small")
    assert (small.epochs, small.schedule) == (10, "step:0.25/2")
    vit = find("s1/table1")
    assert vit.recipe(vit.cell("vit-b-32/gsam"), "small").warmup == 1000


def recipe_of(table: str, cell: str) -> Any:
    return find(table).cell(cell).recipe


def test_settings_of_the_papers():
    """Typed again from the papers."""
    gam = recipe_of("s0/table1", "mnist/mlp-3/gam")
    assert (gam.method, gam.epochs, gam.batch, gam.lr, gam.base) == ("gam:T=3", 10, 100, 1e-3, "adam")
    assert (gam.auxiliary, gam.augmentation, dict(gam.model_settings)) == ("previous", "none", {"hidden": 256})
    method: Any = gam.build_method()
    assert (method.eps, method.discrepancy, method.period) == (1e-3, "dot", 1)
    assert recipe_of("s0/table1", "cifar10/cnn-14/gam").method == "gam"
    assert recipe_of("s0/table1", "cifar10/cnn-5/sam-0.1").method == "sam:rho=0.1,normalize=false"
    crsam = recipe_of("s0/table1", "fashion/mlp-3/crsam").build_method()
    assert (crsam.rho, crsam.gamma, crsam.beta) == (0.1, 0.1, 0.01)
    gnam = recipe_of("s2/table1", "cifar100/resnet-18/basic/sam-gnam")
    assert gnam.method == "gnam:alpha=0.3,oracle=(sam:rho=0.1)"
    assert recipe_of("s2/table1", "cifar10/pyramidnet-110/basic/sgd").lr == 0.05
    assert recipe_of("s2/table4", "cifar10/densenet-121/basic/sgd").weight_decay == 1e-3
    assert recipe_of("s3/table2", "cifar100-s/asam").method == "asam:rho=1.0,eta=0.1"
    assert recipe_of("s4/vgg-19", "sam/lr-0.01/wd-1e-06").method == "sam:rho=0.1"


def test_the_setup_of_the_two_repositories():
    """The learning rate of each epoch and the loss, typed out from github.com/davda54/sam, example/."""
    recipe = recipe_of("extra/wrn-16-8", "asam")
    epochs = [recipe.lr_at(390 * epoch, 390) for epoch in range(200)]
    assert epochs == pytest.approx([0.1] * 60 + [0.02] * 60 + [0.004] * 40 + [0.0008] * 40)
    logits, target = torch.randn(5, 10, dtype=torch.float64), torch.tensor([3, 0, 9, 1, 1])
    wanted = torch.full((5, 10), 0.1 / 9, dtype=torch.float64).scatter(1, target[:, None], 0.9)
    ours = F.cross_entropy(logits, target, label_smoothing=recipe.label_smoothing)
    torch.testing.assert_close(ours, -(wanted * logits.log_softmax(1)).sum(1).mean(), rtol=1e-12, atol=0)
    assert recipe_of("extra/wrn-16-8", "sgd-400").epochs == 400


SPOT = {  # typed again from the papers
    ("extra/wrn-16-8", "gsam"): (0.9755, None),
    ("s0/table1", "mnist/mlp-3/sgd"): (0.97368, 0.00072),
    ("s0/table1", "cifar10/cnn-5/crsam"): (0.69444, 0.00117),
    ("s0/table1", "cifar10/cnn-14/sam-0.1"): (0.84288, 0.00345),
    ("s0/table1", "svhn/mlp-3/gam"): (0.81175, 0.00217),
    ("s0/table1", "mnist/cnn-3/crsam"): (0.93852, 0.01727),
    ("s0/table1", "imagenet/resnet-50/gam"): (0.65924, None),
    ("s1/table2", "weighted"): (0.754, None),
    ("s1/table6", "constant-ascent"): (0.762, None),
    ("s1/table5", "vanilla-600"): (0.72, None),
    ("s1/table3", "vit-s-16/flowers/gsam"): (0.903, None),
    ("s2/table1", "cifar10/resnet-18/basic/sgd"): (0.9532, 0.0013),
    ("s2/table1", "cifar10/resnet-18/basic/sam-gnam"): (0.9675, 0.0018),
    ("s2/table1", "cifar100/resnet-18/basic/gnam"): (0.7953, 0.0030),
    ("s2/table1", "cifar100/wrn-28-10/autoaugment/sam"): (0.8384, 0.0030),
    ("s2/table4", "cifar100/vit-small/randaugment/sgd"): (0.7996, 0.0022),
    ("s2/table5", "cifar100/resnet-101/randaugment/gnp"): (0.8131, 0.0088),
    ("s2/table6", "noise-80/sam-gnam"): (0.7633, None),
    ("s2/table7", "cifar10/gnam-0.1"): (0.9615, None),
    ("s2/table2", "vit-b-32/gnam"): (0.7358, 0.0006),
    ("s2/table3", "swin-t/pets/sam"): (0.9359, None),
    ("s3/table2", "cifar10-s/det"): (0.6392, None),
    ("s3/table2", "svhn-s/ssam"): (0.2028, None),
}


@pytest.mark.parametrize(("where", "numbers"), SPOT.items(), ids=lambda v: "-".join(map(str, v)))
def test_claims_are_the_papers_numbers(where, numbers):
    found = [c for c in claims() if (c.experiment, c.cell) == where and c.metric.endswith("test_accuracy")]
    assert [(c.value, c.error) for c in found] == [numbers]


def test_more_claims_of_one_row():
    row = {c.metric: c.value for c in claims() if (c.experiment, c.cell) == ("s1/table1", "vit-b-32/gsam")}
    assert list(row.values()) == [0.768, 0.827, 0.63, 0.251, 0.517]


def test_claims_and_trends_refer_to_existing_cells():
    for claim in claims():
        experiments()[claim.experiment].cell(claim.cell)
    assert {trend.experiment for trend in trends()} <= set(experiments())
    assert len({(t.experiment, t.name) for t in trends()}) == len(trends())
    by_table = {name: sum(c.experiment == name for c in claims()) for name in experiments()}
    counts = {"s0/table1": 8 * 6 + 3, "s1/table1": 12 * 3 * 5, "s2/table1": 160, "s2/table4": 96, "s3/table2": 42}
    assert {name: by_table[name] for name in counts} == counts


def test_cells_are_chosen_by_name_beginning_part_or_pattern():
    table = find("s0/table1")
    assert [c.name for c in select(table, ["cifar10/cnn-5/gam"])] == ["cifar10/cnn-5/gam"]
    assert len(select(table, ["cifar10/cnn-5"])) == 6
    assert len(select(table, ["gam"])) == 12
    assert len(select(table, ["*/cnn-*/gam,mnist"])) == 7 + 12 - 1
    with pytest.raises(UserError, match=r"no cell of s0/table1 'cifra10': did you mean cifar10"):
        select(table, ["cifra10"])
    with pytest.raises(UserError, match=r"no table or figure 's0/tabel1': did you mean s0/table1"):
        find("s0/tabel1")
