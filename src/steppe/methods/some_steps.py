"""The base class of methods that run another method on some of the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..method import Context, Looks, Memory, Method, remembered_vectors
from ..vector import Space
from .plain import Plain

PLAIN = Plain()


class OwnStep(int):
    """A step of a method that runs on some of the steps only: how many steps it has run before.

    It is a number like any other, for `looks` and for `phase`. A method that must know how far training is asks
    `training_step`, and one that must know which of its own steps came before a step of training `own_steps_before`.
    """

    training: int  # how many steps training has taken
    before: Callable[[int], int]  # how many of the method's own steps came before a step of training

    def __new__(cls, own_steps: int, step: int, own_before: Callable[[int], int]) -> OwnStep:
        """`step` is that of the outer method, an `OwnStep` too if it is nested; `own_before` counts from its steps."""
        made = super().__new__(cls, own_steps)
        made.training = training_step(step)
        made.before = lambda at: own_before(own_steps_before(step, at))
        return made


def training_step(step: int) -> int:
    """How many steps training has taken at a method's step."""
    return step.training if isinstance(step, OwnStep) else step


def own_steps_before(step: int, at: int) -> int:
    """How many of the steps that `step` counts came before step `at` of training."""
    return step.before(at) if isinstance(step, OwnStep) else at


class _OnSomeSteps(Method):
    """A method on some of the steps, another (the plain gradient) on the others. Each counts only its own steps.

    A subclass defines `_active`, on which steps the method runs, and `one_in`, on how many.
    """

    method: Method  # not dataclass fields here: a subclass declares them in its own order
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
        """Whether the method runs at a step, and how many steps it has run before."""
        raise TypeError(f"{self.name} does not say on which steps it runs its method: implement _active")

    @property
    def one_in(self) -> float:
        """The method runs on one step in this many."""
        raise TypeError(f"{self.name} does not say on how many steps it runs its method: implement one_in")

    @property
    def cost(self) -> float:
        """The method's looks on its share of the steps, the other's on the rest."""
        return self.between.cost + (self.method.cost - self.between.cost) / self.one_in

    @property
    def copies(self) -> int:
        """The copies of one method and what the other remembers, whichever way round is more."""
        return max(
            self.method.copies + remembered_vectors(self.between),
            self.between.copies + remembered_vectors(self.method),
        )

    @property
    def needs(self) -> frozenset[str]:
        """What either method needs."""
        return self.method.needs | self.between.needs

    @property
    def stackable(self) -> bool:
        """Whether both methods are."""
        return self.method.stackable and self.between.stackable

    def looks(self, ctx: Context) -> Looks:
        """The looks of the method that runs at this step."""
        method, own_steps = self._running_at(ctx.step)
        return (yield from method.looks(replace(ctx, step=own_steps)))

    def _running_at(self, step: int) -> tuple[Method, int]:
        """The method that runs at a step, and how many steps it has run before."""
        active = self._active(step)[0]

        def own_before(at: int) -> int:
            steps = self._active(at)[1]
            return steps if active else at - steps

        return self.method if active else self.between, OwnStep(own_before(step), step, own_before)

    def phase(self, step: int) -> int | None:
        method, own_steps = self._running_at(step)
        inner = method.phase(own_steps)
        return None if inner is None else 2 * inner + (method is self.method)

    def memory(self, space: Space) -> Memory:
        """The memory of both methods."""
        of_method, of_between = self.method.memory(space), self.between.memory(space)
        if shared := of_method.keys() & of_between.keys():
            names = ", ".join(sorted(shared))
            raise ValueError(f"{self.name}: {self.method.name} and {self.between.name} both remember {names}")
        return {**of_method, **of_between}
