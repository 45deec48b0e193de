"""A second batch beside each batch, for methods that look at two."""

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
    """Pair each batch of a loader with an auxiliary one.

    The auxiliary batch comes from the training data:

    - "fresh": from a second, independent pass over the loader (which should shuffle). Loads twice the data.
    - "fixed": always the first batch of such a pass: what Algorithm 1 of Generalization Aware Minimization prints.
    - "previous": the batch of the step before; costs nothing. The first batch is paired with itself.

    Or it is **held out of training**. Give the batch itself (a tensor, a tuple, a mapping, or a list with a tensor in
    it), or a loader of batches, which is gone through again and again. `hold_out` splits a data set in two:

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


def hold_out(data: Dataset[T], how_many: float, seed: int = 0) -> tuple[Subset[T], Subset[T]]:
    """Split a data set in two: what to train on, and what to hold out of training.

    `how_many` is a number of examples, or a share if it is below 1. Which ones depends on the seed alone.

    >>> train, held = hold_out(list(range(10)), 0.2)
    >>> len(train), len(held), sorted([*train, *held])
    (8, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    total = _length(data)
    count = how_many_of(how_many, total)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    rest, held = (part.sort().values.tolist() for part in (order[count:], order[:count]))
    return Subset(data, rest), Subset(data, held)


def how_many_of(how_many: float, total: int) -> int:
    """A number of examples from a number, or from a share below 1; both parts must have some."""
    number = isinstance(how_many, (int, float)) and not isinstance(how_many, bool)
    count = round(how_many * total) if number and 0 < how_many < 1 else how_many
    if not number or count != int(count) or not 0 < count < total:
        raise ValueError(f"hold out a number of examples from 1 to {total - 1}, or a share of them, not {how_many!r}")
    return int(count)


def held_out_batches(second: Any) -> Iterator[Any]:
    """Held-out batches without end: one batch again and again, or those of a loader, anew when it ends."""
    if isinstance(second, (int, float)):
        raise ValueError(f"hold examples out first: train, held = steppe.hold_out(data, {second!r}); then two loaders")
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
    """Whether this is one batch: a tensor, a tuple, a mapping, or a list with a tensor in it. Else it is a loader."""
    return isinstance(second, (Tensor, tuple, Mapping)) or (
        isinstance(second, list) and any(isinstance(part, Tensor) for part in second)
    )


def _length(data: Any) -> int:
    if not hasattr(data, "__len__"):
        raise ValueError(
            "only a data set with a length can be split: give with_auxiliary a held-out loader of your own"
        )
    return len(data)


def _two_passes(batches: Iterable[B]) -> tuple[Iterator[B], Iterator[B]]:
    main, other = iter(batches), iter(batches)
    if main is other:
        raise ValueError(
            "this loader cannot be gone through twice at once (an iterator, or persistent_workers=True): take another "
            'one, or with_auxiliary(batches, "previous")'
        )
    return main, other
