"""`average="ema:0.999"`: one training, evaluated as it is and averaged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from steppe.averaging import averaging
from steppe.cli.app import app
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.records import read_records, with_average
from steppe.lab.statistics import summarise
from steppe.lab.training.ranks import Ranks
from steppe.lab.training.run import Run, average_of
from steppe.support.errors import UserError

SHORT = Recipe(
    base="sgd", lr=0.1, momentum=0.9, batch=32, epochs=4, share=0.25, seed=1, method="sam", average="swa:0.5"
)


def trained(recipe: Recipe, folder: Any = None, until: int = 0) -> Any:
    run = Run(recipe, folder)
    for _ in run.train():
        if until and len(run.record["epochs"]) == until:
            break
    return run


def test_averaging_does_not_change_training_and_the_average_is_exact():
    run, plain = trained(SHORT), trained(replace(SHORT, average=""))
    by_hand, steps = Run(replace(SHORT, average="")), []
    for _ in by_hand.train():
        steps.append([p.detach().clone() for p in by_hand.net.parameters()])
    for one, other in zip(run.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [epoch["test_loss"] for epoch in run.record["epochs"]] == [e["test_loss"] for e in plain.record["epochs"]]
    half = steps[len(steps) // 2 :]
    for average, *weights in zip(run.average.model.parameters(), *half, strict=True):
        torch.testing.assert_close(average, torch.stack(weights).mean(0), rtol=1e-5, atol=1e-6)
    epochs = run.record["epochs"]
    assert ["averaged" in epoch for epoch in epochs] == [False, False, True, True]
    with run.average.in_place():
        assert run.evaluate() == epochs[-1]["averaged"] == run.record["averaged"] != {"test_loss": 0.0}
    assert "averaged" not in plain.record


def test_a_stopped_run_goes_on_with_its_average(tmp_path):
    """A net with BatchNorm, whose statistics are estimated for the averaged weights."""
    recipe = replace(SHORT, model="cnn-3", average="ema:0.9", epochs=3)
    whole = trained(recipe)
    trained(recipe, tmp_path, until=2)
    again = trained(recipe, tmp_path)
    assert again.record["averaged"] == whole.record["averaged"]
    for one, other in zip(
        again.average.model.state_dict().values(), whole.average.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
    name = "8.running_mean"  # of a layer whose inputs depend on the weights
    assert not torch.equal(whole.net.state_dict()[name], whole.average.model.state_dict()[name])


def test_last_and_averaged_weights_are_rows_and_the_averaged_base_is_a_rival():
    records = []
    for method, role in (("plain", "base"), ("sam", "method")):
        for seed in (0, 1, 2):
            run = Run(replace(SHORT, method=method, seed=seed, epochs=2, average="ema:0.9"), role=role)
            for _ in run.train():
                pass
            records.append(run.record)
    rows = {row.label: row for row in summarise(records)}
    assert [(row.label, row.role) for row in rows.values()][:2] == [("SGD", "base"), ("SGD, EMA 0.9", "rival")]
    assert set(rows) == {"SGD", "SGD, EMA 0.9", "SAM", "SAM, EMA 0.9"}
    for label, row in rows.items():
        expected = [
            r["averaged"] if "EMA" in label else r["final"] for r in records if r["label"] == label.split(",")[0]
        ]
        mean = sum(e["test_accuracy"] for e in expected) / 3
        assert row.n == 3 and row.mean is not None and row.mean.value == pytest.approx(mean)
        assert row.label == "SGD" or (row.difference is not None and row.difference.against == "SGD")


def test_a_record_without_an_average_is_itself():
    run = trained(replace(SHORT, epochs=1, average=""))
    assert with_average(run.record) == [run.record]
    early = trained(replace(SHORT, average="swa:0.99"), until=1)
    (raw,) = with_average(early.record)
    assert raw["recipe"]["average"] == ""


def test_the_command_prints_results_of_last_and_averaged_weights(tmp_path):
    task = "train --data digits --share 0.1 --batch 32 --epochs 1 --average ema:0.5 --no-curvature --out"
    said = CliRunner().invoke(app, [*task.split(), str(tmp_path)])
    assert said.exit_code == 0, said.output
    record: Any = read_records(tmp_path)[0]
    assert f"SGD, EMA 0.5: test accuracy {record['averaged']['test_accuracy']:.4f}" in said.output
    assert record["recipe"]["average"] == "ema:0.5"


def test_wrong_input():
    with pytest.raises(UserError, match="average 'ema:2' is not ema:DECAY"):
        replace(SHORT, average="ema:2")
    with pytest.raises(UserError, match="--average needs whole copies"):
        average_of(SHORT, torch.nn.Linear(1, 1), 3, Ranks("fsdp2", 0, 2))
    assert averaging(torch.nn.Linear(1, 1), "ema", 3).started is False
