"""A second batch beside each batch, for methods that look at two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

B = TypeVar("B")


def with_auxiliary(
    batches: Iterable[B], choose: Literal["fresh", "fixed", "previous"] = "fresh"
) -> Iterator[tuple[B, B]]:
    """Pair each batch of a loader with an auxiliary one.

    - "fresh": from a second, independent pass over the loader (which should shuffle). Loads twice the data.
    - "fixed": always the first batch of such a pass: what Algorithm 1 of Generalization Aware Minimization prints.
    - "previous": the batch of the step before; costs nothing. The first batch is paired with itself.

    >>> list(with_auxiliary("abc", "previous"))
    [('a', 'a'), ('b', 'a'), ('c', 'b')]
    >>> list(with_auxiliary("abc", "fixed"))
    [('a', 'a'), ('b', 'a'), ('c', 'a')]
    """
    if choose not in ("fresh", "fixed", "previous"):
        raise ValueError(f'choose must be "fresh", "fixed" or "previous", not {choose!r}')
    if choose == "previous":
        previous: list[B] = []
        for batch in batches:
            yield batch, (previous or [batch])[0]
            previous = [batch]
    elif choose == "fixed":
        main, other = _two_passes(batches)
        for fixed in other:
            for batch in main:
                yield batch, fixed
            return
    else:
        yield from zip(*_two_passes(batches), strict=False)


def _two_passes(batches: Iterable[B]) -> tuple[Iterator[B], Iterator[B]]:
    main, other = iter(batches), iter(batches)
    if main is other:
        raise ValueError(
            "this loader cannot be gone through twice at once (an iterator, or persistent_workers=True): take another "
            'one, or with_auxiliary(batches, "previous")'
        )
    return main, other
