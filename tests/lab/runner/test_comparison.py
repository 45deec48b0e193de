"""Comparisons: fair, repeatable to the bit, and measured right."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from helpers.image_excerpt import inputs_of
from steppe.lab.data import prepare
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.records import read_records
from steppe.lab.runner.comparison import plan, usual_rivals
from steppe.lab.runner.jobs import Place
from steppe.lab.runner.local import perform, train_jobs
from steppe.lab.training.batches import generator_for
from steppe.lab.training.final_curvature import Measuring
from steppe.lab.training.run import Run
from steppe.support.errors import UserError

LONGER = ["SGD, 2x longer", "SGD, 4x longer", "SGD, 6x longer"]
SMALL = Recipe(base="sgd", lr=0.1, momentum=0.9, batch=64, epochs=2, share=0.25, schedule="cosine")


def without_time(records):
    found = json.loads(json.dumps(records))
    for record in found:
        for place in (*record["epochs"], record["final"]):
            del place["seconds"]
        del record["started"], record["finished"]
    return found


@pytest.mark.slow
def test_a_comparison_gives_the_same_bits_with_any_number_of_processes(tmp_path):
    jobs = plan(SMALL, ["sam:rho=0.1", "gam"], [0, 1])
    place = Place(tmp_path / "a", measuring=Measuring(samples=16, probes=2, dimension=4, products=168, points=3))
    first = perform(jobs, place)
    turns = perform(jobs, replace(place, folder=tmp_path / "b", together=2))
    assert without_time(first) == without_time(turns)
    assert [record["label"] for record in first[:6]] == ["SGD", *LONGER, "SAM rho=0.1", "GAM"]
    gradients = {record["label"]: record["final"]["gradients"] for record in without_time(first)}
    longer = dict(zip(LONGER, (20, 40, 60), strict=True))
    assert gradients == {"SGD": 10, **longer, "SAM rho=0.1": 20, "GAM": 60}
    news = []
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.json")}
    assert perform(jobs, place, tell=news.append) == read_in_order(jobs, tmp_path / "a")
    assert all(one.before and one.ended for one in news) and len(news) == 12
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.json")}, "nothing is repeated"


def read_in_order(jobs, folder):
    by_key = {record["key"]: record for record in read_records(folder)}
    return [by_key[job.recipe.key] for job in jobs]


def test_a_run_gets_the_role_it_has_now(tmp_path):
    (job, *_) = plan(SMALL, ["sam"], [0])
    place = Place(tmp_path)
    train_jobs([replace(job, role="method", label="mine")], place)
    (record,) = train_jobs([job], place)
    assert (record["role"], record["label"]) == ("base", "SGD")
    assert read_records(tmp_path) == [record]


def test_curvature_is_that_of_the_whole_hessian():
    recipe = replace(SMALL, epochs=1, model_settings={"hidden": 3}, precision="float64")
    run = Run(recipe, measure=Measuring(samples=100, points=5))
    for _ in run.train():
        pass
    found: Any = run.record["curvature"]
    rows = torch.randperm(359, generator=generator_for("measured"))[:100]
    x, y = prepare(inputs_of(run.data.train)[rows], run.data, torch.float64), run.data.train.targets[rows]
    params = {name: p.detach() for name, p in run.net.named_parameters()}
    sizes = [p.numel() for p in params.values()]

    def loss(flat):
        pieces = [piece.view(p.shape) for piece, p in zip(flat.split(sizes), params.values(), strict=True)]
        return F.cross_entropy(functional_call(run.net, dict(zip(params, pieces, strict=True)), (x,)), y)

    flat = torch.cat([p.reshape(-1) for p in params.values()])
    hessian: Any = torch.autograd.functional.hessian(loss, flat)
    values = torch.linalg.eigvalsh(hessian)
    assert found["examples"] == 100 and found["loss"]["value"] == pytest.approx(loss(flat).item(), rel=1e-12)
    assert found["top"]["value"] == pytest.approx(values[-1].item(), rel=1e-2)
    assert abs(found["trace"]["value"] - values.sum().item()) <= 5 * found["trace"]["error"] + 1e-9
    assert found["sharpness"]["rho"] == 0.05
    gradient: Any = torch.autograd.functional.jacobian(loss, flat)
    gap = loss(flat + 0.05 * gradient / gradient.norm()) - loss(flat)
    assert found["surrogate_gap"]["value"] == pytest.approx(gap.item(), rel=1e-9)
    assert found["sharpness"]["value"] >= found["surrogate_gap"]["value"] - 1e-12
    landscape = found["landscape"]
    assert landscape["axis"] == [-0.5, -0.25, 0.0, 0.25, 0.5] and landscape["loss"][2][2] == found["loss"]["value"]
    density = found["density"]
    width = density["grid"][1] - density["grid"][0]
    assert sum(density["density"]) * width == pytest.approx(1.0, abs=0.02)


def test_rivals_are_the_base_with_other_fields():
    average, *others = asked = usual_rivals(SMALL)
    jobs = [job for job in plan(SMALL, ["sam"], [3], rivals=asked) if job.role == "rival"]
    assert [job.name for job in jobs] == ["SGD, Nesterov", "SGD, weight decay 0.0005"]
    assert [job.recipe for job in jobs] == [replace(SMALL, seed=3, **fields) for fields in others]
    assert usual_rivals(replace(SMALL, base="adam", momentum=0.0)) == [average]
    assert usual_rivals(replace(SMALL, momentum=0.0, weight_decay=0.1, average="swa:0.5")) == []
    with pytest.raises(UserError, match="did you mean weight_decay"):
        plan(SMALL, ["sam"], [0], rivals=[{"weigth_decay": 1.0}])


def test_an_average_of_the_base_comes_from_its_own_trainings():
    """It is evaluated where the base is trained, once or longer; methods and other rivals have none."""
    jobs = plan(SMALL, ["sam"], [0], rivals=usual_rivals(SMALL))
    averaged = {job.role: job.recipe.average for job in jobs}
    assert averaged == {"base": "ema:10%", "rival": "", "equal-cost": "ema:10%", "method": ""}
    with pytest.raises(UserError, match="one average of the base can be evaluated, not 2"):
        plan(SMALL, ["sam"], [0], rivals=[{"average": "ema:10%"}, {"average": "swa:0.5"}])


def test_without_options_two_problems_are_compared(monkeypatch, tmp_path):
    """Clean and wrong labels, ten seeds; with any option of the recipe, or with methods, it is one comparison."""
    from typer.testing import CliRunner

    from steppe.cli import app as cli
    from steppe.cli.commands import compare

    planned: list[Any] = []

    def stop(jobs: list[Any], *_: Any) -> None:
        planned[:] = jobs
        raise UserError("stopped here")

    monkeypatch.setattr(compare, "train_all", stop)
    monkeypatch.setattr(compare, "make_place", lambda *_: Place(tmp_path))

    def plan_of(*options: str) -> tuple[set[float], set[int], set[str]]:
        CliRunner().invoke(cli.app, ["compare", *options])
        recipes = [job.recipe for job in planned]
        return {r.label_noise for r in recipes}, {r.seed for r in recipes}, {job.role for job in planned}

    roles = {"base", "rival", "equal-cost", "method"}
    assert plan_of() == ({0.0, 0.6}, set(range(10)), roles)
    assert plan_of("--seeds", "2") == ({0.0, 0.6}, {0, 1}, roles)
    assert plan_of("--label-noise", "0.2") == ({0.2}, {0, 1, 2}, roles)
    assert plan_of("sam", "--rivals", "none") == ({0.0}, {0, 1, 2}, roles - {"rival"})
    assert plan_of("sam", "--no-equal-cost") == ({0.0}, {0, 1, 2}, {"base", "method"})
    plan_of("sam", "--rivals", "weight_decay=5e-4,nesterov=true", "--rivals", "momentum=0.95")
    rivals = [job.name for job in planned if job.role == "rival" and job.recipe.seed == 0]
    assert rivals == ["SGD, weight decay 0.0005, Nesterov", "SGD, momentum 0.95"]
