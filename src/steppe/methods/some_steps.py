"""What methods that run another method on some of the steps share."""

from __future__ import annotations

from dataclasses import replace

from ..method import Context, Looks, Memory, Method, remembered_vectors
from ..vector import Space
from .plain import Plain

PLAIN = Plain()


class _OnSomeSteps(Method):
    """A method on some of the steps, another (the plain gradient) on the rest. Each counts only its own steps.

    A member says in `_active` on which steps, and in `one_in` on how many of them.
    """

    method: Method  # not fields yet: a member says in which order its own come
    between: Method = PLAIN

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.between, Method):
            raise ValueError(f"{self.name}: between must be a method, for example SAM(), not {self.between!r}")
        if not isinstance(self.method, Method):
            raise ValueError(f"{self.name}: needs a method, for example {self._example()}, not {self.method!r}")

    def _example(self) -> str:
        return f"{self.name}(SAM())"

    def _active(self, step: int) -> tuple[bool, int]:
        """Whether the method runs at a step, and at how many steps before it did."""
        raise TypeError(f"{self.name} does not say on which steps it runs its method")

    @property
    def one_in(self) -> float:
        """The method runs on one step in this many."""
        raise TypeError(f"{self.name} does not say on how many steps it runs its method")

    @property
    def cost(self) -> float:
        """The method's looks on its share of the steps, the other's on the rest."""
        return self.between.cost + (self.method.cost - self.between.cost) / self.one_in

    @property
    def copies(self) -> int:
        """Those of the method that needs more, and what the other remembers."""
        return max(
            self.method.copies + remembered_vectors(self.between),
            self.between.copies + remembered_vectors(self.method),
        )

    @property
    def needs(self) -> frozenset[str]:
        """What either method needs."""
        return self.method.needs | self.between.needs

    def looks(self, ctx: Context) -> Looks:
        """The method's looks when its turn has come, the other's otherwise."""
        method, turn = self._now(ctx.step)
        return (yield from method.looks(replace(ctx, step=turn)))

    def _now(self, step: int) -> tuple[Method, int]:
        """The method of a step, and how many steps of its own it has had."""
        active, turn = self._active(step)
        return (self.method, turn) if active else (self.between, step - turn)

    def phase(self, step: int) -> int | None:
        method, turn = self._now(step)
        inner = method.phase(turn)
        return None if inner is None else 2 * inner + (method is self.method)

    def memory(self, space: Space) -> Memory:
        """That of both methods."""
        mine, theirs = self.method.memory(space), self.between.memory(space)
        if mine.keys() & theirs.keys():
            raise ValueError(f"{self.name}: {self.method.name} and {self.between.name} would share what they remember")
        return {**mine, **theirs}
