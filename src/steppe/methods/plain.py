"""The base optimizer alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import HERE, Context, Looks, Method


@dataclass(frozen=True)
class Plain(Method):
    """The base optimizer alone: one look, d = g(w). The baseline of every comparison."""

    cost = 1
    stackable = True
    copies = 0

    def looks(self, ctx: Context) -> Looks:
        """d = g(w)."""
        return (yield HERE).grad
