"""The methods, one file each. Every file in this folder is imported: a new method need not be listed anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import by_name, find, load_all, method_names

if TYPE_CHECKING:  # for editors and type checkers, which run no code; a method that is missing here works as well
    from .arwp import ARWP, MARWP
    from .asam import ASAM
    from .crsam import CRSAM
    from .entropy_sgd import EntropySGD
    from .every import Every
    from .fsam import FSAM
    from .functionalsam import FunctionalSAM
    from .gam import GAM
    from .gapsam import GapSAM
    from .gnam import GNAM, GNAMFast
    from .gnp import GNP
    from .gsam import GSAM
    from .late import Late
    from .lesam import LESAM
    from .looksam import LookSAM
    from .msam import MSAM
    from .plain import Plain
    from .random_steps import Random
    from .sam import SAM
    from .sampa import SAMPa
    from .sasam import SASAM, SASGD
    from .ssam import SSAM
    from .stablesam import StableSAM
    from .universal import DetSAM, FrobSAM, ProductSAM, TraceSAM, UniversalSAM
    from .wsam import WSAM
    from .xsam import XSAM

__all__ = [
    "ARWP", "ASAM", "CRSAM", "FSAM", "GAM", "GNAM", "GNP", "GSAM", "LESAM", "MARWP", "MSAM", "SAM", "SASAM", "SASGD",
    "SSAM", "WSAM", "XSAM", "DetSAM", "EntropySGD", "Every", "FrobSAM", "FunctionalSAM", "GNAMFast", "GapSAM", "Late",
    "LookSAM", "Plain", "ProductSAM", "Random", "SAMPa", "StableSAM", "TraceSAM", "UniversalSAM", "by_name", "find",
    "method_names",
]  # fmt: skip

_found = load_all(list(__path__))
globals().update(_found)
__all__ += [name for name in _found if name not in __all__]
