"""A data set: two splits, the number of classes, and how raw inputs become inputs of a model.

A split is any object with `len` and `take(rows, seed)`, which returns the inputs and targets of these rows on the
split's device. All reading goes through `DataSet.batches`. `Split` keeps all examples in memory, images as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...support.errors import UserError

Device = torch.device | str
Batch = tuple[Tensor, Tensor]


@runtime_checkable
class Readable(Protocol):
    """What `DataSet` requires of a split."""

    @property
    def targets(self) -> Tensor:
        """The class of each example, int64."""
        ...

    def __len__(self) -> int: ...

    def take(self, rows: Tensor, seed: int | None = None) -> Batch:
        """The inputs and targets of these rows. `seed` is for splits that crop at random while reading."""
        ...

    def to(self, device: Device) -> Readable:
        """The same split, with its batches on this device."""
        ...


@dataclass(frozen=True)
class Split:
    """Examples in memory."""

    inputs: Tensor = field(repr=False)  # N x ...: images are uint8, N x C x H x W
    targets: Tensor = field(repr=False)  # N, int64

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise UserError(f"{len(self.inputs)} inputs but {len(self.targets)} targets")
        if self.targets.dim() != 1 or self.targets.dtype != torch.int64:
            shape = tuple(self.targets.shape)
            raise UserError(f"targets must be one int64 class each, not {self.targets.dtype} of shape {shape}")

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Tensor, seed: int | None = None) -> Batch:
        """These rows, gathered on the device. `seed` has no effect here."""
        rows = rows.to(self.inputs.device)
        return self.inputs[rows], self.targets[rows]

    def to(self, device: Device) -> Split:
        """The same examples on another device."""
        return type(self)(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True)
class Examples(Split):
    """Examples in memory whose targets are not classes: numbers, labels, tokens."""

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise UserError(f"{len(self.inputs)} inputs but {len(self.targets)} targets")


@dataclass(frozen=True)
class DataSet:
    """Training and test examples. `classes` is the number of outputs that a model has for an example.

    `mean` and `std` are per channel, for inputs scaled to [0, 1]; if empty, inputs are only scaled. `peak` is the
    largest value that a byte of an image takes.
    """

    name: str
    train: Readable
    test: Readable
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    peak: float = 255.0
    tokens: bool = False  # whether inputs are token ids, which stay integers

    def to(self, device: Device) -> DataSet:
        """The same data on a device: examples in memory move there; streamed batches are delivered there."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.test.take(torch.zeros(1, dtype=torch.int64))[0].shape[1:])

    def batches(
        self,
        split: Literal["train", "test"],
        batch_size: int,
        order: Tensor | None = None,
        seed: int | None = None,
    ) -> Iterator[Batch]:
        """Batches of a split, in the given order of rows (default: as stored). The last batch may be smaller.

        `seed` determines the random crops of data that is streamed from files (None: centre crops).
        """
        source: Any = self.train if split == "train" else self.test
        if order is None:
            order = torch.arange(len(source))
        rows = order.split(batch_size)
        if hasattr(source, "stream"):  # reads ahead
            yield from source.stream(rows, seed)
        else:
            for some in rows:
                yield source.take(some, seed)


def prepare(
    inputs: Tensor,
    data: DataSet,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """A batch as input for a model: floating point, bytes scaled to [0, 1], normalised if `data` has a mean.

    It does not synchronise with the device, and may be part of a captured graph.
    """
    if data.tokens:
        return inputs
    scaled = inputs.to(dtype, memory_format=memory_format)
    if inputs.dtype == torch.uint8:
        scaled = scaled / data.peak
    if not data.mean:
        return scaled
    shift, scale = _constants(data.mean, data.std, scaled.device, dtype)
    return (scaled - shift) * scale


@lru_cache(maxsize=64)
def _constants(mean: tuple, std: tuple, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # Cached: making a tensor from Python numbers synchronises with the device. Not an inference tensor, even if the
    # first caller is in inference mode: autograd must be able to use it.
    with torch.inference_mode(False):
        shape = (-1, 1, 1)
        centre = torch.tensor(mean, device=device, dtype=dtype).view(shape)
        return centre, torch.tensor([1 / s for s in std], device=device, dtype=dtype).view(shape)


def first(data: DataSet, share: float) -> DataSet:
    """The data set with only the first `share` of its training examples: 0.1 gives S3's "-S" sets."""
    if not 0 < share <= 1:
        raise UserError(f"share must be above 0 and at most 1, not {share:g}")
    count = round(share * len(data.train))
    if count == 0:
        raise UserError(f"share {share:g} of {len(data.train)} training examples is none")
    return replace(data, name=f"{data.name} first {share:.4g}", train=subset(data.train, torch.arange(count)))


def with_label_noise(data: DataSet, share: float, seed: int = 0) -> DataSet:
    """Symmetric label noise on the training labels; test labels stay.

    Exactly `share` of the labels, chosen at random, change to another class, chosen uniformly: GNAM says "a fraction
    of the training data labels is randomly flipped". The same seed gives the same labels for every method
    and device.
    """
    if not 0 <= share <= 1:
        raise UserError(f"label noise must be a share from 0 to 1, not {share:g}")
    generator = torch.Generator().manual_seed(seed)
    count = len(data.train)
    chosen = torch.randperm(count, generator=generator)[: round(share * count)]
    old = data.train.targets.cpu()
    step = torch.randint(1, data.classes, (len(chosen),), generator=generator)
    new = old.clone()
    new[chosen] = (old[chosen] + step) % data.classes
    return replace(data, name=f"{data.name} noise {share:.4g}", train=with_targets(data.train, new))


def with_targets(split: Readable, targets: Tensor) -> Any:
    """The split with other targets."""
    there = targets.to(split.targets.device)
    if not is_dataclass(split):
        raise UserError(f"labels can be replaced in a Split, not in a {type(split).__name__}")
    return replace(split, targets=there)


def subset(split: Any, rows: Tensor) -> Any:
    """Only these rows of a split."""
    return split.subset(rows) if hasattr(split, "subset") else _kind(split)(*split.take(rows))


def _kind(split: Any) -> type[Split]:
    return type(split) if isinstance(split, Split) else Split
