"""Auxiliary batches: a second batch for each batch, for methods that look at two."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

B = TypeVar("B")
T = TypeVar("T", covariant=True)
_KINDS = ("fresh", "fixed", "previous")
FEW = 10_000  # with fewer examples, those that are held out should take turns: they matter, and tell little


def with_auxiliary(
    batches: Iterable[B], second: Literal["fresh", "fixed", "previous"] | Tensor | Iterable[Any] = "fresh"
) -> Iterator[tuple[B, Any]]:
    """Iterate over pairs (batch, auxiliary batch) of a loader.

    The auxiliary batch is training data:

    - "fresh": a batch of a second, independent pass over the loader (which should shuffle). Loads twice the data.
    - "fixed": always the first batch of such a pass, as Algorithm 1 of Generalization Aware Minimization prints it.
    - "previous": the batch of the previous step; costs nothing. The first batch is paired with itself.

    Or it is **held out of training**. Pass the batch itself (a tensor, a tuple, a mapping, or a list that contains a
    tensor), or a loader of batches, which is iterated again whenever it ends. It should shuffle: a method that looks at
    every tenth batch only may else see the same one always. `hold_out` splits a data set in two:

        train, held = steppe.hold_out(data, 500)
        loader, second = DataLoader(train, 128, shuffle=True), DataLoader(held, 100, shuffle=True)
        for batch, other in steppe.with_auxiliary(loader, second):
            opt.step(lambda: loss_of(batch), auxiliary=lambda: loss_of(other))

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
        _warn_of_too_few(second)
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


class Part(Dataset[T]):
    """A part of a data set: the examples that are trained on, or those that are held out (see `hold_out`)."""

    def __init__(self, split: _Split, held_out: bool):
        self._split, self._held_out = split, held_out

    @property
    def indices(self) -> list[int]:
        """Which examples of the whole data set are in this part now."""
        return self._split.rows(self._held_out)

    @property
    def in_turns(self) -> bool:
        """Whether other examples are held out in later epochs."""
        return self._split.in_turns

    @property
    def turn(self) -> int:
        """How often the held-out examples have been exchanged."""
        return self._split.turn

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins, counted from 0 as in `DistributedSampler.set_epoch`. The other part follows.

        It has an effect only if examples are held out in turns. Data loaders with persistent workers follow too.
        """
        self._split.set_epoch(epoch)

    def __len__(self) -> int:
        return self._split.size(self._held_out)

    def __getitem__(self, index: Any) -> T:
        return self._split.data[self.indices[index]]

    def __getitems__(self, indices: list[int]) -> Any:
        """Several examples at once, as a `DataLoader` asks for them."""
        rows = [self.indices[i] for i in indices]
        several = getattr(self._split.data, "__getitems__", None)
        return several(rows) if callable(several) else [self._split.data[row] for row in rows]


class _Split:
    """Which examples are held out. Both parts share it."""

    def __init__(self, data: Any, count: int, seed: int, in_turns: bool):
        self.data, self.count, self.in_turns = data, count, in_turns
        self._order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        self._epoch = torch.ones((), dtype=torch.int64).share_memory_()  # counts from 1; the workers of a loader see it
        self._rows_of: tuple[int, list[list[int]]] = -1, []  # a turn, and the rows of both parts in it
        self.told = True  # the epoch, since the last pass began; the first one need not be told

    @property
    def turn(self) -> int:
        return turn_of(int(self._epoch))

    def set_epoch(self, epoch: int) -> None:
        if epoch < 0:
            raise ValueError(f"epochs count from 0, not from {epoch}")
        self.told = True
        if self.in_turns:
            self._epoch.fill_(epoch + 1)

    def size(self, held_out: bool) -> int:
        return self.count if held_out else len(self._order) - self.count

    def rows(self, held_out: bool) -> list[int]:
        if self._rows_of[0] != self.turn:
            held, rest = held_and_rest(self._order, self.count, int(self._epoch))
            self._rows_of = self.turn, [rest.tolist(), held.tolist()]
        return self._rows_of[1][held_out]


def hold_out(data: Dataset[T], how_many: float, seed: int = 0, in_turns: bool = False) -> tuple[Part[T], Part[T]]:
    """Split a data set into two: the examples to train on, and those that are held out of training.

    `how_many` is the number of examples to hold out, or their share if it is below 1. They are drawn with the seed.

    >>> train, held = hold_out(list(range(10)), 0.2)
    >>> len(train), len(held), sorted([*train, *held])
    (8, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])

    With `in_turns`, others are held out from the 1st, 2nd, 4th, 8th … epoch on. So all are trained on, and each is
    unseen for long enough to tell how unseen examples fare. Call `set_epoch` of either part before each epoch:

    >>> train, held = hold_out(list(range(10)), 0.2, in_turns=True)
    >>> for epoch in range(4):
    ...     train.set_epoch(epoch)
    ...     print(held.indices)
    [1, 4]
    [5, 7]
    [5, 7]
    [3, 9]
    """
    split = _Split(data, how_many_of(how_many, _length(data)), seed, in_turns)
    return Part(split, held_out=False), Part(split, held_out=True)


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
    number = isinstance(how_many, Real) and not isinstance(how_many, bool)  # NumPy's numbers are Real too
    count = round(float(how_many) * total) if number and 0 < how_many < 1 else how_many
    if not number or not 0 < count < total or count != int(count):
        raise ValueError(f"hold out a number of examples from 1 to {total - 1}, or a share of them, not {how_many!r}")
    return int(count)


def held_out_batches(second: Any) -> Iterator[Any]:
    """An endless iterator of held-out batches: always the same batch, or those of a loader, pass after pass.

    If other examples are held out from now on (`Part.set_epoch`), what the loader has loaded before is dropped.
    """
    if isinstance(second, Real):
        raise ValueError(
            f"{second!r} is not a batch or a loader: hold examples out with train, held = "
            f"steppe.hold_out(data, {second!r}), and pass a loader of `held`"
        )
    if is_batch(second):
        while True:
            yield second
    if isinstance(second, Dataset) and not isinstance(second, IterableDataset):
        raise ValueError(
            "this is a data set of single examples: pass a loader of it, DataLoader(held, 100, shuffle=True)"
        )
    part = part_of(second)
    while True:
        empty, turn = True, part and part.turn
        for batch in second:
            empty = False
            if part and part.turn != turn:
                break
            yield batch
        if empty:
            raise ValueError("the held-out loader has no batch, or is an iterator that has ended: give a loader")


def part_of(second: Any) -> Part[Any] | None:
    """The part of a data set that a loader reads, if it is one that `hold_out` made, in turns."""
    part = getattr(second, "dataset", None)
    while part is not None and not isinstance(part, Part):  # in another data set, which transforms its examples
        part = getattr(part, "dataset", None)
    return part if part is not None and part.in_turns else None


def _warn_of_too_few(second: Any) -> None:
    """Warn if a method would not see all of the held-out examples; at the start of a pass over pairs."""
    if isinstance(second, DataLoader):
        in_order = isinstance(getattr(second.batch_sampler, "sampler", None), SequentialSampler)
        if in_order and len(second) > 1:
            warnings.warn(
                "steppe: the held-out loader does not shuffle, so a method that looks at some of its batches only, as "
                "GapSAM does, may see the same one always: use DataLoader(..., shuffle=True)",
                stacklevel=3,
            )
    if (part := part_of(second)) is not None:
        if not part._split.told:
            warnings.warn(
                "steppe: examples are held out in turns, but set_epoch was not called since the last pass over them: "
                "call it before each epoch, with the number of the epoch",
                stacklevel=3,
            )
        part._split.told = False


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
