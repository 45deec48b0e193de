"""Auxiliary batches: a second batch for each batch, for methods that look at two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

B = TypeVar("B")
T = TypeVar("T")
_KINDS = ("fresh", "fixed", "previous")


def with_auxiliary(
    batches: Iterable[B], second: Literal["fresh", "fixed", "previous"] | Tensor | Iterable[Any] = "fresh"
) -> Iterator[tuple[B, Any]]:
    """Iterate over pairs (batch, auxiliary batch) of a loader.

    The auxiliary batch is training data:

    - "fresh": a batch of a second, independent pass over the loader (which should shuffle). Loads twice the data.
    - "fixed": always the first batch of such a pass, as Algorithm 1 of Generalization Aware Minimization prints it.
    - "previous": the batch of the previous step; costs nothing. The first batch is paired with itself.

    Or it is **held out of training**. Pass the batch itself (a tensor, a tuple, a mapping, or a list that contains a
    tensor), or a loader of batches, which is iterated again whenever it ends. `hold_out` splits a data set in two:

        train, held = steppe.hold_out(data, 500)
        for batch, second in steppe.with_auxiliary(DataLoader(train, 128, shuffle=True), DataLoader(held, 100)):
            opt.step(lambda: loss_of(batch), auxiliary=lambda: loss_of(second))

    >>> list(with_auxiliary("abc", "previous"))
    [('a', 'a'), ('b', 'a'), ('c', 'b')]
    >>> list(with_auxiliary("abc", "fixed"))
    [('a', 'a'), ('b', 'a'), ('c', 'a')]
    >>> list(with_auxiliary("abc", ("held", "out")))
    [('a', ('held', 'out')), ('b', ('held', 'out')), ('c', ('held', 'out'))]
    >>> list(with_auxiliary("abc", iter(["x", "y", "z"])))
    [('a', 'x'), ('b', 'y'), ('c', 'z')]
    """
    if not isinstance(second, str):
        yield from zip(batches, held_out_batches(second), strict=False)
    elif second not in _KINDS:
        raise ValueError(f'choose "fresh", "fixed" or "previous", or give a held-out batch or loader, not {second!r}')
    elif second == "previous":
        previous: list[B] = []
        for batch in batches:
            yield batch, (previous or [batch])[0]
            previous = [batch]
    elif second == "fixed":
        main, other = _two_passes(batches)
        for fixed in other:
            for batch in main:
                yield batch, fixed
            return
    else:
        yield from zip(*_two_passes(batches), strict=False)


def hold_out(data: Dataset[T], how_many: float, seed: int = 0, epoch: int | None = None) -> tuple[Subset[T], Subset[T]]:
    """Split a data set into two subsets: one to train on, and one that is held out of training.

    `how_many` is the number of examples to hold out, or their share if it is below 1. They are drawn with the seed.
    With `epoch`, which counts from 1, examples are held out **in turns**: others from epochs 1, 2, 4, 8 … on. So all
    are trained on, and each is unseen for long enough to tell how unseen examples fare.

    >>> train, held = hold_out(list(range(10)), 0.2)
    >>> len(train), len(held), sorted([*train, *held])
    (8, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> [list(hold_out(list(range(10)), 0.2, epoch=epoch)[1]) for epoch in (1, 2, 3, 4)]
    [[1, 4], [5, 7], [5, 7], [3, 9]]
    """
    total = _length(data)
    count = how_many_of(how_many, total)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    held, rest = (part.tolist() for part in held_and_rest(order, count, 1 if epoch is None else epoch))
    return Subset(data, rest), Subset(data, held)


def turn_of(epoch: int) -> int:
    """In which turn an epoch is, if other examples are held out from epochs 1, 2, 4, 8 … on. Both count from 1 and 0.

    >>> [turn_of(epoch) for epoch in (1, 2, 3, 4, 7, 8)]
    [0, 1, 1, 2, 2, 3]
    """
    if epoch < 1:
        raise ValueError(f"epochs count from 1, not from {epoch}")
    return int(epoch).bit_length() - 1


def held_and_rest(order: Tensor, count: int, epoch: int) -> tuple[Tensor, Tensor]:
    """The rows that are held out in an epoch, and the others, both sorted; `order` says whose turn it is."""
    order = order.roll(-turn_of(epoch) * count)
    return order[:count].sort().values, order[count:].sort().values


def how_many_of(how_many: float, total: int) -> int:
    """The number of held-out examples, from a number or from a share below 1. No part may be empty."""
    number = isinstance(how_many, (int, float)) and not isinstance(how_many, bool)
    count = round(how_many * total) if number and 0 < how_many < 1 else how_many
    if not number or count != int(count) or not 0 < count < total:
        raise ValueError(f"hold out a number of examples from 1 to {total - 1}, or a share of them, not {how_many!r}")
    return int(count)


def held_out_batches(second: Any) -> Iterator[Any]:
    """An endless iterator of held-out batches: always the same batch, or those of a loader, pass after pass."""
    if isinstance(second, (int, float)):
        raise ValueError(
            f"{second!r} is not a batch or a loader: hold examples out with train, held = "
            f"steppe.hold_out(data, {second!r}), and pass a loader of `held`"
        )
    if is_batch(second):
        while True:
            yield second
    while True:
        empty = True
        for batch in second:
            empty = False
            yield batch
        if empty:
            raise ValueError("the held-out loader has no batch, or is an iterator that has ended: give a loader")


def is_batch(second: Any) -> bool:
    """Whether this is a batch (a tensor, a tuple, a mapping, or a list that contains a tensor) and not a loader."""
    return isinstance(second, (Tensor, tuple, Mapping)) or (
        isinstance(second, list) and any(isinstance(part, Tensor) for part in second)
    )


def _length(data: Any) -> int:
    if not hasattr(data, "__len__"):
        raise ValueError(
            "only a data set with a length can be split: pass with_auxiliary a held-out loader of your own"
        )
    return len(data)


def _two_passes(batches: Iterable[B]) -> tuple[Iterator[B], Iterator[B]]:
    main, other = iter(batches), iter(batches)
    if main is other:
        raise ValueError(
            "this loader cannot be iterated twice at the same time (an iterator, or persistent_workers=True): use "
            'another loader, or with_auxiliary(batches, "previous")'
        )
    return main, other
