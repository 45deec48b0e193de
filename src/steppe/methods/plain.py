"""No method at all."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import HERE, Context, Looks, Method


@dataclass(frozen=True)
class Plain(Method):
    """The base optimizer as it is: one look, d = g(w). What every other method is compared with."""

    cost = 1
    copies = 0

    def looks(self, ctx: Context) -> Looks:
        """d = g(w)."""
        return (yield HERE).grad
