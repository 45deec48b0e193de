"""steppe: sharpness-aware training that works under everything people train with."""

from .method import (
    HERE,
    Context,
    Look,
    Looks,
    Method,
    Number,
    Schedule,
    Seen,
    adaptive_ascent,
    ascent,
    drive,
    linear_in_lr,
)
from .methods import ASAM, GSAM, SAM, Every, Plain, by_name, method_names
from .optimizer import Pass, SharpnessAware, wrap
from .vector import Space, Vector, reject, unit

__version__ = "0.1.0"

__all__ = [
    "ASAM", "GSAM", "HERE", "SAM", "Context", "Every", "Look", "Looks", "Method", "Number", "Pass", "Plain",
    "Schedule", "Seen", "SharpnessAware", "Space", "Vector", "adaptive_ascent", "ascent", "by_name", "drive",
    "linear_in_lr", "method_names", "reject", "unit", "wrap",
]  # fmt: skip
