"""steppe: sharpness-aware training that works under everything people train with."""

from typing import TYPE_CHECKING

from . import methods
from .auxiliary import hold_out, with_auxiliary
from .averaging import Averaging
from .engine.looks import Pass
from .graphs.capture import Captured, capture
from .graphs.fixed_scale import FixedScale
from .graphs.replayed import Replayed
from .method import (
    HERE,
    HVP,
    Context,
    Look,
    Looks,
    Memory,
    Method,
    Number,
    Schedule,
    Seen,
    adaptive_ascent,
    ascent,
    reusing,
)  # fmt: skip
from .methods import by_name, method_names
from .methods.norm_only import norm_only
from .optimizer import SharpnessAware, wrap
from .schedules import linear_in_lr
from .testing import drive
from .vector import Space, Vector, reject, unit

if TYPE_CHECKING:  # for editors and type checkers; at run time the methods come from the registry, below
    from .lab.comparing import compare as compare
    from .lab.tuning import tune as tune
    from .methods import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "HERE", "HVP", "Averaging", "Captured", "Context", "FixedScale", "Look", "Looks", "Memory", "Method", "Number",
    "Pass", "Replayed", "Schedule", "Seen", "SharpnessAware", "Space", "Vector", "adaptive_ascent", "ascent",
    "by_name", "capture", "drive", "hold_out", "linear_in_lr", "method_names", "methods", "norm_only", "reject",
    "reusing", "unit", "with_auxiliary", "wrap",
]  # fmt: skip

_methods = {cls.__name__: cls for cls in methods.registry.own_methods()}
globals().update(_methods)
__all__ += list(_methods)  # pyright: ignore[reportUnsupportedDunderAll]

_LAB = {"compare": "lab.comparing", "tune": "lab.tuning"}  # imported on first use: they need more than torch

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LAB:
            raise AttributeError(f"module 'steppe' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"steppe.{_LAB[name]}"), name)

    def __dir__() -> list[str]:
        return sorted([*globals(), *_LAB])
