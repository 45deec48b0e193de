"""steppe: sharpness-aware training that works under everything people train with."""

from . import methods, replay
from .auxiliary import with_auxiliary
from .capture import Captured, capture
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
from .methods import (
    ASAM,
    CRSAM,
    FSAM,
    GAM,
    GNAM,
    GNP,
    GSAM,
    SAM,
    SASAM,
    SASGD,
    SSAM,
    WSAM,
    DetSAM,
    EntropySGD,
    Every,
    FrobSAM,
    GNAMFast,
    LookSAM,
    Plain,
    ProductSAM,
    TraceSAM,
    UniversalSAM,
    by_name,
    method_names,
)  # fmt: skip
from .optimizer import SharpnessAware, wrap
from .scaling import FixedScale
from .schedules import linear_in_lr
from .trying import drive
from .vector import Space, Vector, reject, unit
from .walk import Pass

__version__ = "0.1.0"

__all__ = [
    "ASAM", "CRSAM", "FSAM", "GAM", "GNAM", "GNP", "GSAM", "HERE", "HVP", "SAM", "SASAM", "SASGD", "SSAM", "WSAM",
    "Captured", "Context", "DetSAM", "EntropySGD", "Every", "FixedScale", "FrobSAM", "GNAMFast", "Look", "LookSAM",
    "Looks", "Memory", "Method", "Number", "Pass", "Plain", "ProductSAM", "Schedule", "Seen", "SharpnessAware", "Space",
    "TraceSAM", "UniversalSAM", "Vector", "adaptive_ascent", "ascent", "by_name", "capture", "drive", "linear_in_lr",
    "method_names", "methods", "reject", "replay", "reusing", "unit", "with_auxiliary", "wrap",
]  # fmt: skip
