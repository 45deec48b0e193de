"""`auxiliary="held-out:N"`: examples for the second batch that training never sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.image_excerpt import inputs_of
from steppe import GAM, GapSAM
from steppe.lab.data import prepare
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.batches import Batches, data_for
from steppe.lab.training.run import Run
from steppe.support.errors import UserError

SHORT = Recipe(
    base="sgd", lr=0.1, momentum=0.9, batch=32, epochs=4, share=0.25, seed=1, method="gapsam:period=2",
    auxiliary="held-out:50",
)  # fmt: skip


def batches(recipe=SHORT, rank=0, ranks=1) -> Any:
    return Batches(recipe, data_for(recipe), GapSAM.needs, torch.device("cpu"), rank, ranks)


def images(*parts):
    return {tuple(row) for part in parts for row in part.flatten(1).tolist()}


def test_held_out_and_trained_examples_partition_the_data():
    own = batches()
    assert (own.examples, own.held_out, own.steps) == (309, 50, 9)
    trained, second = set(), set()
    for epoch in (1, 2, 3, 4):
        for x, _, (x2, y2) in own.of_epoch(epoch):
            trained |= images(x)
            second |= images(x2)
            assert x2.shape[0] == len(y2) == 32
    everything = images(prepare(inputs_of(data_for(SHORT).train), data_for(SHORT)))
    assert not trained & second and trained | second == everything and len(second) == 50


def test_held_out_examples_depend_on_the_seed_and_rivals_train_on_all():
    first, again, other = (batches(replace(SHORT, seed=seed)).split(1)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    sam, own = Run(replace(SHORT, method="sam")), Run(SHORT)
    assert sam.batches.held_out == 0 and "held_out_examples" not in sam.record
    counts: list[Any] = [run.record.get("train_examples") for run in (sam, own)]
    assert [*counts, own.record.get("held_out_examples")] == [359, 309, 50]


def test_examples_held_out_in_turns():
    """Others from epochs 1, 2, 4, 8 … on; the rest is trained on, and the method is told how long an epoch is."""
    turns = replace(SHORT, auxiliary="in-turns:50")
    own = batches(turns)
    seen = {}
    for epoch in range(1, 9):
        held, trained_on = own.split(epoch)
        assert sorted([*held.tolist(), *trained_on.tolist()]) == list(range(359)) and len(held) == 50
        x, _, (x2, _) = next(own.of_epoch(epoch))
        stored = prepare(inputs_of(own.data.train), own.data)
        assert images(x) <= images(stored[trained_on]) and images(x2) <= images(stored[held])
        seen[epoch] = set(held.tolist())
    assert seen[2] == seen[3] and seen[4] == seen[5] == seen[6] == seen[7]
    assert not seen[1] & seen[2] and not (seen[1] | seen[2]) & seen[4] and not (seen[2] | seen[4]) & seen[8]
    assert seen[1] == set(batches().split(5)[0].tolist()), "the first turn's are those that could always be held out"
    assert (
        vars(Run(turns).optimizer.method)["epoch_steps"] == 9 and vars(Run(SHORT).optimizer.method)["epoch_steps"] == 0
    )
    wrapped = Run(replace(turns, method="every:k=2,method=(gapsam:period=2)")).optimizer.method
    assert vars(wrapped)["method"].epoch_steps == 9  # of training: GapSAM itself runs on every second one
    assert [wrapped.phase(step) for step in (24, 28)] == [5, 3], "measure; begin, as the third turn does at step 27"


def test_few_held_out_examples_are_one_batch_that_ranks_share():
    few = replace(SHORT, auxiliary="held-out:7")
    seen = [images(second[0]) for *_, second in batches(few).of_epoch(1)]
    assert all(one == seen[0] and len(one) == 7 for one in seen)
    for whole, *parts in zip(*(batches(SHORT, *r).of_epoch(1) for r in ((0, 1), (0, 2), (1, 2))), strict=True):
        assert torch.equal(whole[2][0], torch.cat([part[2][0] for part in parts]))
    with pytest.raises(UserError, match="1 held-out examples cannot be split over 2"):
        next(batches(replace(SHORT, auxiliary="held-out:1"), ranks=2).of_epoch(1))


@pytest.mark.parametrize(("text", "count"), [
    ("held-out", 32), ("held-out:0.1", 36), ("held-out:1", 1), ("fresh", 0), ("in-turns", 18), ("in-turns:7", 7),
])  # fmt: skip
def test_number_of_held_out_examples(text, count):
    recipe = replace(SHORT, auxiliary=text)
    assert recipe.second_batch(frozenset({"auxiliary"}), 359) == (text.partition(":")[0], count)
    assert recipe.second_batch(frozenset(), 359) == ("", 0)
    assert Recipe(auxiliary="held-out").second_batch(GAM().needs, 50_000) == ("held-out", 500)


def test_a_method_that_needs_held_out_examples_gets_them_without_being_asked_for():
    assert Recipe().second_batch(GapSAM.needs, 9_999) == ("in-turns", 500)
    assert Recipe().second_batch(GapSAM.needs, 10_000) == ("held-out", 100)
    assert Recipe().second_batch(GapSAM.needs, 8) == ("in-turns", 2)  # BatchNorm refuses a batch of one
    assert Recipe().second_batch(GAM().needs, 9_999) == ("fresh", 0)
    assert Recipe(auxiliary="previous").second_batch(GapSAM.needs, 9_999) == ("previous", 0)
    run = Run(Recipe(method="gapsam", batch=64, epochs=1))
    assert run.record.get("held_out_examples") == 72 and run.batches.epoch_steps == 21


@pytest.mark.parametrize("text", ["held-out:", "held-out:0", "held-out:-3", "held-out:2.5", "held-out:nan", "fixed:3"])
def test_invalid_numbers_of_held_out_examples(text):
    with pytest.raises(UserError, match="only held-out and in-turns take a number"):
        replace(SHORT, auxiliary=text)


def test_more_held_out_examples_than_there_are():
    with pytest.raises(UserError, match="359 training examples are too few"):
        batches(replace(SHORT, auxiliary="held-out:359"))


def test_a_stopped_run_goes_on_with_the_same_examples(tmp_path, monkeypatch):
    monkeypatch.setattr("steppe.lab.training.run.PAUSE", 0.0)  # a checkpoint after every epoch
    whole, part = Run(SHORT), Run(SHORT, tmp_path)
    for _ in whole.train():
        pass
    for _ in part.train():
        if len(part.record["epochs"]) == 2:
            break
    again = Run(SHORT, tmp_path)
    assert len(again.record["epochs"]) == 2
    for _ in again.train():
        pass
    for one, other in zip(again.net.state_dict().values(), whole.net.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert again.record["recipe"]["auxiliary"] == "held-out:50" and "rho" in again.record["epochs"][-1]["metrics"]
