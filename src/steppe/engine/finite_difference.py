"""Hessian-vector products by finite differences of gradients, and the rule for the step of the difference.

H v ≈ (g(w + h v̂) − g(w)) ‖v‖/h          one more look       ("forward")
H v ≈ (g(w + h v̂) − g(w − h v̂)) ‖v‖/2h   two more looks      ("central")

They work wherever gradients do: under autocast, DDP, FSDP2, with any attention kernel, compiled. The step is h = c ‖w‖
with c from the table below: large enough that the gradients differ by more than their rounding error, small enough
that the Hessian is nearly constant over the step. Measured along the gradient of softplus, GELU, batch-normalised and
attention nets, at initialisation and trained, the relative errors are:

    precision   forward                central
    float64     1e-8 to 3e-7           1e-11 to 2e-10
    float32     3e-4 to 3e-3           1e-5 to 1e-4
    TF32        0.01 to 0.1            1e-3 to 0.02
    float16     0.01 to 0.1 (0.4)      2e-3 to 0.02 (0.1)
    bfloat16    0.04 to 0.3 (0.5)      7e-3 to 0.08 (0.2)

The figures in brackets are those of a trained convolutional net with batch norm, whose gradient is nearly zero.
The precision is detected: from the parameters, TF32's switches, FSDP2's policy, and from autocast if the optimizer was
given the model. With ``model=None``, autocast inside the closure is not detected.

For models with kinks (ReLU, max-pool) a difference is another quantity, not a noisy estimate: it includes the jumps of
the gradient between the two points, which the Hessian, defined almost everywhere, does not contain. Both are legitimate
measures of curvature; they do not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor

from ..method import HVP, Look, Looks, Seen
from ..vector import TINY, Vector

# Step relative to ‖w‖, for (forward, central) differences.
STEP = {
    "float64": (4e-9, 3e-7),
    "float32": (5e-5, 2e-4),
    "float16": (1.5e-3, 3e-3),  # also TF32: the same mantissa
    "bfloat16": (4e-3, 7e-3),
}


def by_difference(
    asks: Looks, w_norm: Tensor, precision: Callable[[], str], central: bool = False
) -> Generator[Any, Seen, Vector]:
    """A method's looks, with every Hessian-vector product replaced by one or two looks.

    `precision` is called only when the method asks for a product: the precision is known after the first look.
    """
    ask = [next(asks)]  # a list that is emptied before the look, so that no reference keeps a vector alive
    try:
        while True:
            ask = [asks.send((yield from _answer(ask, w_norm, precision, central)))]
    except StopIteration as end:
        return end.value


def _answer(ask: list[Any], w_norm: Tensor, precision: Callable[[], str], central: bool) -> Generator[Any, Any, Any]:
    """What the method is sent for a look, a product, or several of them."""
    if isinstance(ask[0], HVP):
        h = STEP[precision()][central] * w_norm.clamp(min=1e-3)
        return (yield from _product(ask.pop(), h, central))
    if isinstance(ask[0], Look) or _only_looks(ask[0]):  # which may run side by side
        return (yield ask.pop())
    answers: list[Any] = []
    several: Iterator[Any] = iter(ask.pop())
    while one := list(islice(several, 1)):
        answers.append((yield from _answer(one, w_norm, precision, central)))
    return tuple(answers)


def _only_looks(asks: Iterable[Look | HVP]) -> bool:
    """Whether these are looks without a product. What makes them one at a time is not asked: that would run it."""
    return isinstance(asks, (tuple, list)) and not any(isinstance(one, HVP) for one in asks)


def _product(ask: HVP, h: Tensor, central: bool) -> Generator[Look, Seen, Vector]:
    length = ask.vector.norm() + TINY
    move = ask.vector * (h / length)
    origin = move * 0.0 if ask.at.offset is None else ask.at.offset
    there = (yield replace(ask.at, offset=origin + move)).grad
    if central:
        behind = (yield replace(ask.at, offset=origin - move)).grad
        return (there - behind) * (length / (2 * h))
    return (there - ask.seen.grad) * (length / h)
