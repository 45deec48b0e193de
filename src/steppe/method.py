"""The interface of a method: a generator that yields where to look, is sent what is seen there, returns a direction.

A method works on vectors only: it knows no model, no optimizer, no process and no autograd. It is a frozen
dataclass whose fields are its hyperparameters and whose `looks` reads like its paper's pseudocode:

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class TwoSided(Method):
...     "The mean of the gradients on both sides."
...     rho: Number = 0.05
...     cost = 3
...
...     def looks(self, ctx):
...         here = yield HERE
...         e = self.rho * ascent(here.grad)
...         there = yield Look(e)
...         behind = yield Look(-e)
...         return 0.5 * (there.grad + behind.grad)

Because a method only does arithmetic on vectors, `drive` can run it on any gradient function, without a model:

>>> import torch
>>> from steppe import drive
>>> w = torch.tensor([1.0, 2.0], dtype=torch.float64)
>>> drive(TwoSided(rho=0.1), lambda w: w**3, w)
tensor([1.0005, 8.0591], dtype=torch.float64)
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from .engine.random_vectors import Draws
from .vector import TINY, Each, Space, Vector, unit

Schedule: TypeAlias = Callable[[int, Any], Any]  # (step, learning rate) -> number
# A hyperparameter: a number, or a Schedule, which the optimizer turns into a number before `looks` runs.
Number: TypeAlias = Annotated[Any, "a number or a schedule"]


@dataclass(frozen=True)
class Look:
    """A request for the gradient (and the loss) at w + offset, on a named batch.

    Without an offset the look is at w itself. The batch "main" is that of the step, "auxiliary" is a second batch, and
    "sample" is the single example with the index `sample`.

    With `linear`, the loss is linearised in the model's outputs: its gradient with respect to them is that of the
    step's first look, and only the Jacobian of the outputs is taken at w + offset.
    """

    offset: Vector | None = None
    batch: str = "main"
    sample: int | None = None
    linear: bool = False


HERE = Look()  # at w itself


@dataclass(frozen=True)
class Seen:
    """The answer to a look: the gradient there, and the loss if it is known."""

    grad: Vector
    loss: Tensor | None = None


@dataclass(frozen=True)
class HVP:
    """A request for the Hessian at a place times a vector. The answer is a `Vector`.

    `seen` is the answer to a look at that place: with its gradient, a forward difference takes one more look, not two.
    """

    vector: Vector
    at: Look
    seen: Seen


# A method yields one look, or several independent ones: a tuple, or an iterator that makes them one at a time.
Looks: TypeAlias = Generator["Look | HVP | Iterable[Look | HVP]", Any, Vector]
Memory: TypeAlias = dict[str, "Vector | Tensor"]


@dataclass
class Context:
    """What a method knows about the step it is in, besides what it sees, and what it may ask for."""

    # Steps taken so far; skipped steps do not count. Inside `Every`, `Late` and `Random` a method's own steps: then
    # `methods.some_steps.training_step` says which step of training it is.
    step: int
    lr: Any  # learning rate of the first parameter group before this step; None if the base optimizer has none
    weights: Callable[[], Vector]
    draws: Draws
    memory: Mapping[str, Any] = field(default_factory=dict[str, Any])  # as the last step left it
    # These take effect only if the step is taken. A step that is skipped (fp16 overflow) drops them:
    remembered: Memory = field(default_factory=dict[str, Any])
    wishes: dict[str, Any] = field(default_factory=dict[str, Any])
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    losses: list[Tensor | None] = field(default_factory=list[Any])  # of the looks so far

    @property
    def w(self) -> Vector:
        """The weights at the start of the step, also while a look has moved the parameters."""
        return self.weights()

    def remember(self, **values: Vector | Tensor) -> None:
        """Store values for the next step, which finds them in `ctx.memory`."""
        for name, value in values.items():
            if not isinstance(value, (Vector, Tensor)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"remember({name}=...) takes a Vector or a tensor, not {value!r}")
        self.remembered.update(values)

    def set_lr(self, lr: Tensor) -> None:
        """Set the base optimizer's learning rate, for this step and all steps until the next call."""
        self.wishes["lr"] = lr

    def step_aside(self, direction: Vector) -> None:
        """After the base optimizer's step, also subtract lr times this direction, bypassing the base optimizer."""
        self.wishes["aside"] = direction

    def note_gap(self) -> None:
        """Record the surrogate gap L(w + e) − L(w), if the losses are known. Call it after the look at w + e."""
        first, last = self.losses[0], self.losses[-1]
        if first is not None and last is not None:
            self.metrics["surrogate_gap"] = last - first


@dataclass(frozen=True)
class Method:
    """Base class of all methods. Subclass it as a frozen dataclass and implement `looks`."""

    paper: ClassVar[str] = ""
    advice: ClassVar[str] = ""  # one line for somebody who chooses a method
    ranges: ClassVar[str] = ""  # the values that the papers used
    # `cost`, `copies`, `needs` and `stackable` are values, or properties where they depend on the settings.
    # Looks per step, on average. A Hessian-vector product counts as one:
    cost: ClassVar[Any] = 1
    # Extra copies of the parameters at the peak, including what is remembered between steps, on a model with
    # negligible activations. (On a GPU there are temporaries too: see `tensor_lists.LARGEST`.) During a look, when
    # activations take memory, most methods hold fewer.
    copies: ClassVar[Any] = 1
    nonnegative: ClassVar[tuple[str, ...]] = ("rho",)
    radius: ClassVar[str] = ""  # the field that a parameter group's "rho" overrides
    needs: ClassVar[Any] = frozenset[str]()  # of "loss", "auxiliary", "held-out", "sample", "hvp", "lr", "outputs"
    # Whether several models can be trained at once (`SharpnessAware(members=...)`). True only if every number that the
    # method computes from vectors may be a tensor with one entry per member:
    stackable: ClassVar[Any] = False
    aliases: ClassVar[tuple[str, ...]] = ()  # other names, in lower case
    registry: ClassVar[dict[str, type[Method]]] = {}  # every method class there is, by its name in lower case

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _refuse_reserved_fields(cls)
        if not cls.__name__.startswith("_"):
            _register(cls)

    def __post_init__(self) -> None:
        for name in sorted(number_fields(type(self))):
            value = getattr(self, name)
            if isinstance(value, (Tensor, Each)) or callable(value):
                continue
            if isinstance(value, Real) and not isinstance(value, (int, float)):  # a number of NumPy
                value = int(value) if isinstance(value, Integral) else float(value)
                object.__setattr__(self, name, value)  # methods are frozen
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{self.name}: {name} must be a finite number or a schedule, not {value!r}")
            if name in self.nonnegative and value < 0:
                raise ValueError(f"{self.name}: {name} must not be negative, got {value}")

    def looks(self, ctx: Context) -> Looks:
        """Yield where to look, receive what is seen there, return the direction for the base optimizer."""
        raise TypeError(f"{self.name} does not say where to look: implement looks(self, ctx)")

    def memory(self, space: Space) -> Memory:
        """The method's memory before the first step: vectors and tensors by name."""
        return {}

    def phase(self, step: int) -> int | None:
        """A number that is the same for steps with the same operations; None for a step that occurs only once.

        Such steps differ in their values alone, so that one recorded CUDA graph can be replayed for all of them.
        Override it if `looks` depends on ``ctx.step``.
        """
        return 0

    @classmethod
    def variants(cls) -> list[Method]:
        """The method in the settings that the contract suite tests."""
        return [cls()]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        """Pairs (special case, what it equals). The contract suite checks that they are equal to the last bit."""
        return []

    @property
    def name(self) -> str:
        """The class name."""
        return type(self).__name__

    def at(self, step: int, lr: Any, group_rho: Sequence[float | None] | None = None) -> Method:
        """This method with every schedule replaced by its value.

        `group_rho` holds, for each parameter, the radius that its group sets, or None. It overrides the method's.
        """
        numbers, values = number_fields(type(self)), dict[str, Any]()
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Method):
                values[f.name] = value.at(step, lr, group_rho)
            elif f.name in numbers and callable(value):
                values[f.name] = value(step, lr)
        inner = any(isinstance(getattr(self, f.name), Method) for f in fields(self))  # it takes the groups' radii
        if group_rho is not None and not self.radius and not inner and fields(self):  # Plain has no settings
            raise ValueError(
                f"{self.name} has no radius that a parameter group could override (it declares no `radius`): remove "
                "rho from the groups; perturb=False excludes a group from perturbation"
            )
        if group_rho is not None and self.radius:
            own = values.get(self.radius, getattr(self, self.radius))
            values[self.radius] = Each([own if rho is None else rho for rho in group_rho])
        return replace(self, **values) if values else self


def remembered_vectors(method: Method) -> int:
    """How many vectors a method remembers between steps."""
    return sum(isinstance(value, Vector) for value in method.memory(Space([torch.zeros(1)])).values())


@functools.cache
def number_fields(cls: type[Method]) -> frozenset[str]:
    """The names of a method's fields that are annotated as `Number`."""
    return frozenset(f.name for f in fields(cls) if _annotation(cls, f.name, f.type) == Number)


def _annotation(cls: type, name: str, annotation: Any) -> Any:
    """A field's type. It is evaluated if `from __future__ import annotations` has made it a string."""
    if not isinstance(annotation, str):
        return annotation
    owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
    try:
        return eval(annotation, {"Number": Number} | vars(sys.modules[owner.__module__]))
    except NameError:  # a local name of the function that defines the class
        return None


def _refuse_reserved_fields(cls: type[Method]) -> None:
    """Raise for a field that hides an attribute of `Method`. Otherwise the error would come deep inside a step."""
    for name, annotation in inspect.get_annotations(cls).items():
        if hasattr(Method, name) and "ClassVar" not in str(annotation):
            raise TypeError(
                f"{cls.__name__}: a setting cannot be called {name!r}, which is an attribute of every method: rename "
                f"it, or write `{name} = ...` without a type annotation to set the attribute"
            )


def _register(cls: type[Method]) -> None:
    """Add a method to the registry. The same class defined again (a notebook cell that is run twice) replaces it."""
    name = cls.__name__.lower()
    known = Method.registry.get(name)
    taken = [other for other in Method.registry.values() if name in other.aliases]
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        taken.append(known)
    if taken:
        other = f"{taken[0].__module__}.{taken[0].__qualname__}"
        raise ValueError(f"a method called {cls.__name__} exists already ({other}): choose another name")
    Method.registry[name] = cls


def ascent(grad: Vector) -> Vector:
    """g/‖g‖ over the weights that may be perturbed, zero on the others: the direction of steepest ascent."""
    return unit(grad.perturbed())


def adaptive_ascent(grad: Vector, w: Vector, eta: float) -> Vector:
    """T²g/‖Tg‖ with T = |w| + η: the direction of steepest ascent when each weight is measured in its own size.

    In a parameter group with ``adaptive=False``, T = 1.
    """
    scale = w.abs() + eta
    if w.space.adaptive is not None:
        flags = zip(scale.tensors, w.space.adaptive, strict=True)
        scale = Vector([t if adaptive else t.new_ones(t.shape) for t, adaptive in flags], w.space)
    scaled = scale * grad.perturbed()
    length = scaled.norm() + TINY
    scaled.mul_(scale)  # in place, to save a vector
    return scaled / length


def one_by_one(looks: Looks) -> Generator[Look | HVP, Any, Vector]:
    """A method's looks one at a time. Looks that the method yields together are answered together, by a tuple."""
    ask: Any = [next(looks)]  # a list that is emptied before the look, so that no reference keeps the offset alive
    try:
        while True:
            if isinstance(ask[0], (Look, HVP)):
                ask = [looks.send((yield ask.pop()))]
                continue
            ask = [looks.send((yield from _answers(iter(ask.pop()))))]
    except StopIteration as end:
        return end.value


def _answers(looks: Iterator[Look | HVP]) -> Generator[Look | HVP, Any, tuple[Any, ...]]:
    """Yield looks one at a time; return all answers."""
    seen: list[Any] = []
    while one := list(islice(looks, 1)):
        seen.append((yield one.pop()))
    return tuple(seen)


def reusing(here: Seen, looks: Looks) -> Looks:
    """Another method's looks, except those at `HERE`: they are answered with `here`. For a method built on another."""
    looks = one_by_one(looks)
    ask = next(looks)
    try:
        while True:
            ask = looks.send(here if ask == HERE else (yield ask))
    except StopIteration as end:
        return end.value
