"""The second batch: from the training data, or held out of it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import steppe
from helpers import problems

DATA = cast("Dataset[Any]", list(range(10)))


def numbers(part: Any) -> list[int]:
    return list(part)


def test_a_held_out_batch_is_repeated_and_a_loader_restarted():
    one = torch.arange(3)
    assert [second is one for _, second in steppe.with_auxiliary("abcd", one)] == [True] * 4
    for batch in ((one, one), {"x": one}, [one, "label"]):
        assert [second is batch for _, second in steppe.with_auxiliary("ab", batch)] == [True] * 2
    pairs = list(steppe.with_auxiliary("abcde", in_order(cast("Dataset[Any]", [1, 2]))))
    assert [(a, b.item()) for a, b in pairs] == [("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", 1)]
    assert [b for _, b in steppe.with_auxiliary("abc", [(1, 1), (2, 2)])] == [(1, 1), (2, 2), (1, 1)]
    assert list(steppe.with_auxiliary([], one)) == []


@pytest.mark.parametrize("second", [[], iter([1])])
def test_held_out_batches_that_end_are_an_error(second):
    with pytest.raises(ValueError, match="give a loader"):
        list(steppe.with_auxiliary("abc", second))


@pytest.mark.parametrize("second", [500, 0.1])
def test_a_number_is_refused_with_a_hint(second):
    with pytest.raises(ValueError, match=rf"steppe.hold_out\(data, {second}\)"):
        list(steppe.with_auxiliary("abc", second))
    with pytest.raises(ValueError, match="held-out batch or loader, not 'new'"):
        list(steppe.with_auxiliary("abc", cast(Any, "new")))


def test_a_data_set_is_split_by_the_seed():
    train, held = steppe.hold_out(DATA, 3, seed=1)
    assert (len(train), len(held)) == (7, 3) and sorted(numbers(train) + numbers(held)) == list(range(10))
    assert [numbers(part) for part in steppe.hold_out(DATA, 0.3, seed=1)] == [numbers(train), numbers(held)]
    assert any(numbers(steppe.hold_out(DATA, 3, seed=s)[1]) != numbers(held) for s in range(2, 5))


@pytest.mark.parametrize(
    "how_many", [0, 10, -1, 2.5, 0.01, 0.99, True, "3", float("nan"), float("inf"), np.bool_(True)]
)
def test_both_parts_must_have_examples(how_many):
    with pytest.raises(ValueError, match="hold out a number of examples from 1 to 9, or a share"):
        steppe.hold_out(DATA, how_many)


def test_data_without_a_length_cannot_be_split():
    with pytest.raises(ValueError, match="a data set with a length"):
        steppe.hold_out(cast(Any, iter(DATA)), 3)


def test_a_loop_with_held_out_examples_is_the_loop_by_hand():
    """GapSAM sees what is held out through its auxiliary closure and nothing of it in training."""
    x, y = problems.digits()
    data = TensorDataset(x[:120], y[:120])
    train, held = steppe.hold_out(data, 24)
    (batch,) = DataLoader(held, 24)
    ends = []
    for second in (DataLoader(held, 24), batch, [batch]):
        model = problems.seeded(problems.mlp)
        opt = steppe.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "gapsam", model=model, period=2)
        for main, other in steppe.with_auxiliary(DataLoader(train, 24), second):
            opt.step(lambda: problems.loss(model, main), auxiliary=lambda: problems.loss(model, other))  # noqa: B023
        ends.append(problems.weights(model))
    rows = torch.tensor(held.indices)
    model = problems.seeded(problems.mlp)
    opt = steppe.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "gapsam", model=model, period=2)
    rest = torch.tensor(train.indices)
    for some in rest.split(24):
        by_hand = problems.Data((x[some], y[some]), (x[rows], y[rows])).closures(model)
        opt.step(by_hand["closure"], auxiliary=by_hand["auxiliary"])
    assert all(torch.equal(end, problems.weights(model)) for end in ends)


def test_examples_are_held_out_in_turns():
    train, held = steppe.hold_out(DATA, 2, 3, in_turns=True)
    splits = []
    for epoch in range(16):
        train.set_epoch(epoch)
        assert len(train) == 8 and len(held) == 2 and sorted([*train, *held]) == list(range(10))
        splits.append(numbers(held))
    assert splits[0] == numbers(steppe.hold_out(DATA, 2, 3)[1])
    for first, last in ((1, 2), (3, 6), (7, 14)):
        assert all(split == splits[first] for split in splits[first : last + 1])
    turns = [i for first in (0, 1, 3, 7, 15) for i in splits[first]]
    assert sorted(turns) == list(range(10)), "nobody's turn comes again before all others had theirs"
    with pytest.raises(ValueError, match="epochs count from 0, not from -1"):
        train.set_epoch(-1)


def test_examples_that_are_always_held_out_are_so_in_every_epoch():
    train, held = steppe.hold_out(DATA, 2, 3)
    before = numbers(held)
    held.set_epoch(5)
    assert numbers(held) == before and train.turn == 0


def test_both_parts_follow_each_other_and_what_was_loaded_before_is_dropped():
    train, held = steppe.hold_out(DATA, 2, 3, in_turns=True)
    seconds = steppe.with_auxiliary(iter(range(100)), DataLoader(held, shuffle=True))
    train.set_epoch(1)
    first = {int(next(seconds)[1]) for _ in range(4)}
    assert first == set(held.indices)
    next(seconds)  # the loader is within a pass now
    held.set_epoch(3)
    assert first.isdisjoint(held.indices) and {int(next(seconds)[1]) for _ in range(4)} == set(held.indices)


def test_a_loader_of_which_the_same_batch_would_be_seen_always_is_warned_of():
    """GapSAM looks at steps 0, 10, 20 …: five batches in a fixed order would show it the first one alone."""
    _, held = steppe.hold_out(DATA, 5)
    with pytest.warns(UserWarning, match="the held-out loader does not shuffle"):
        seen = [int(batch) for _, batch in steppe.with_auxiliary(range(40), DataLoader(held))]
    assert len(set(seen)) == 5 and len(set(seen[::10])) == 1
    seen = [int(batch) for _, batch in steppe.with_auxiliary(range(400), DataLoader(held, shuffle=True))]
    assert len(set(seen[::10])) == 5
    for good in (DataLoader(held, 5), in_order(held), DataLoader(held, batch_size=None, shuffle=True)):
        next(steppe.with_auxiliary("ab", good))


def test_an_epoch_that_was_not_told_is_warned_of():
    """Without set_epoch nothing takes turns, and GapSAM would take the gap itself for the hardness of the examples."""
    train, held = steppe.hold_out(DATA, 2, in_turns=True)
    second = DataLoader(held, 2)
    next(steppe.with_auxiliary("ab", second))
    with pytest.warns(UserWarning, match="set_epoch was not called since the last pass"):
        next(steppe.with_auxiliary("ab", second))
    for epoch in (1, 2):
        train.set_epoch(epoch)
        next(steppe.with_auxiliary("ab", second))
    always = DataLoader(steppe.hold_out(DATA, 2)[1], 2)
    for _ in range(2):
        next(steppe.with_auxiliary("ab", always))


def in_order(data: Dataset[Any]) -> DataLoader[Any]:
    """A loader with a sampler of its own, which may know what it does."""

    class Own(Sampler[int]):
        def __iter__(self):
            return iter(range(len(cast(Any, data))))

    return DataLoader(data, sampler=Own())


@pytest.mark.parametrize("persistent", [False, True])
def test_the_workers_of_a_loader_see_the_turn(persistent):
    train, held = steppe.hold_out(DATA, 2, 3, in_turns=True)
    loader = DataLoader(train, 4, num_workers=1, persistent_workers=persistent)
    for epoch in range(4):
        train.set_epoch(epoch)
        assert sorted([*torch.cat([*loader]).tolist(), *held]) == list(range(10))


def test_a_part_loads_a_batch_at_once_if_the_data_can():
    class Batched(Dataset[int]):
        asked: Any = None

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            raise AssertionError("one by one")

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.asked = indices
            return indices

    data = Batched()
    train, _ = steppe.hold_out(data, 2)
    (batch,) = DataLoader(train, 8)
    assert batch.tolist() == data.asked == train.indices


@pytest.mark.parametrize(("how_many", "count"), [(np.int64(3), 3), (np.float32(0.3), 3), (np.float64(3), 3)])
def test_numbers_of_numpy_split_a_data_set_too(how_many, count):
    assert numbers(steppe.hold_out(DATA, how_many, seed=1)[1]) == numbers(steppe.hold_out(DATA, count, seed=1)[1])
    with pytest.raises(ValueError, match=r"steppe.hold_out\(data, "):
        list(steppe.with_auxiliary("abc", cast(Any, how_many)))


def test_a_part_is_no_loader():
    """Its examples were taken for batches, and it never took turns."""
    _, held = steppe.hold_out(TensorDataset(torch.arange(20)), 5)
    with pytest.raises(ValueError, match="a data set of single examples: pass a loader of it"):
        next(steppe.auxiliary.held_out_batches(held))


def test_a_part_inside_another_data_set_takes_turns():
    class Wrapped(Dataset):
        def __init__(self, dataset):
            self.dataset = dataset

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, index):
            return self.dataset[index]

    _, held = steppe.hold_out(TensorDataset(torch.arange(20)), 5, in_turns=True)
    assert steppe.auxiliary.part_of(DataLoader(Wrapped(Wrapped(held)), 5)) is held
