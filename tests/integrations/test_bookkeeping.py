"""What a trainer counts in its attributes is what it was, whatever a pass did to it."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import torch

from steppe.integrations.bookkeeping import Bookkeeping


def trainer() -> SimpleNamespace:
    metrics = {"train": defaultdict(list, loss=[1.0]), "eval": defaultdict(list)}
    return SimpleNamespace(
        steps=3, metrics=metrics, last=deque([1, 2], maxlen=2), names={"a"}, counts=Counter(a=2), total=torch.ones(2),
        pair=([0],), cache=None, model=object(), data=[1],
    )  # fmt: skip


def test_what_was_changed_is_put_back():
    one, expected = trainer(), trainer()
    train, total, model = one.metrics["train"], one.total, one.model
    before = Bookkeeping(one, leave_out=["data"])
    one.steps += 1
    train["loss"].append(2.0)
    train["tokens"] = [7]
    one.metrics["eval"] = {}
    one.last.append(3)
    one.names.add("b")
    one.counts["a"] += 1
    one.total += 1
    one.pair[0].append(1)
    one.new = 1
    one.data.append(2)
    before.restore()
    assert one.metrics == expected.metrics and one.metrics["train"] is train
    assert one.metrics["eval"].default_factory is list
    assert (one.steps, one.last, one.names, one.counts, one.pair) == (3, deque([1, 2]), {"a"}, Counter(a=2), ([0],))
    assert one.total is total and torch.equal(total, torch.ones(2)) and not hasattr(one, "new")
    assert one.data == [1, 2] and one.model is model  # left out


def test_what_became_an_object_stays():
    """A pass may open a logger or fill a cache: the next pass need not do it again."""
    one = trainer()
    before = Bookkeeping(one)
    one.cache = made = object()
    one.logger = other = object()
    before.restore()
    assert one.cache is made and one.logger is other


def test_a_container_that_nobody_changed_is_not_touched():
    one = trainer()
    before = Bookkeeping(one)
    for _ in one.metrics["train"]:  # clearing it would end this loop with an error
        before.restore()
