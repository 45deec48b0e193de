"""How many samples and targets a batch counts as."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steppe.curvature import Objective
from steppe.curvature.batches import count, ignored_target, length


def test_a_number_in_front_of_the_samples_is_no_sample():
    x = torch.zeros(5, 2)
    assert length({"step": torch.tensor(3), "x": x}) == length((torch.tensor(3.0), [x])) == length(x) == 5
    assert length({"step": torch.tensor(3)}) == 1
    with pytest.raises(TypeError, match="cannot tell how many samples are in a dict"):
        length({"step": 3})


def test_batches_that_begin_with_a_number_are_weighted_and_cut_by_their_samples():
    torch.manual_seed(0)
    model, x = nn.Linear(2, 1).double(), torch.randn(9, 2).double()
    batches = [{"step": torch.tensor(i), "x": part} for i, part in enumerate(x.split([2, 7]))]

    def mean_square(rows: int | None) -> float:
        kept: Any = {"forward": lambda net, batch: net(batch["x"]), "samples": rows}
        return float(Objective(model, lambda output, _: output.square().mean(), batches, **kept).loss())

    assert mean_square(None) == pytest.approx(model(x).square().mean().item(), rel=1e-12)
    assert mean_square(4) == pytest.approx(model(x[:4]).square().mean().item(), rel=1e-12)


class Own(nn.Module):
    """A loss of the user's."""


@pytest.mark.parametrize(
    ("loss_fn", "ignored"),
    [
        (F.cross_entropy, -100),
        (functools.partial(F.nll_loss, ignore_index=2), 2),
        (functools.partial(nn.CrossEntropyLoss(ignore_index=1)), 1),
        (torch.compile(F.cross_entropy, backend="eager"), -100),
        (lambda output, target: F.cross_entropy(output, target), -100),
        (Own(), -100),
        (F.l1_loss, None),
        (functools.partial(F.poisson_nll_loss, full=True), None),
        (nn.MSELoss(), None),
    ],
)
def test_only_losses_that_ignore_a_target_have_one(loss_fn, ignored):
    assert ignored_target(loss_fn) == ignored
    targets = torch.tensor([[-100, 2], [1, 0]])
    assert count(targets, ignored, None) == (4 if ignored is None else 3)


def test_weights_of_classes_are_summed_with_and_without_an_ignored_target():
    weights, targets = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([[0, 2], [2, 1]])
    assert float(count(targets, 2, weights)) == 3.0 and float(count(targets, None, weights)) == 11.0
