"""One file a method. A method is in the registry by being a subclass of Method."""

from __future__ import annotations

import difflib
from typing import Any

from ..method import Method
from .asam import ASAM
from .crsam import CRSAM
from .entropy_sgd import EntropySGD
from .every import Every
from .fsam import FSAM
from .gam import GAM
from .gnam import GNAM, GNAMFast
from .gnp import GNP
from .gsam import GSAM
from .looksam import LookSAM
from .plain import Plain
from .sam import SAM
from .sasam import SASAM, SASGD
from .ssam import SSAM
from .universal import DetSAM, FrobSAM, ProductSAM, TraceSAM, UniversalSAM
from .wsam import WSAM

__all__ = [
    "ASAM", "CRSAM", "FSAM", "GAM", "GNAM", "GNP", "GSAM", "SAM", "SASAM", "SASGD", "SSAM", "WSAM", "DetSAM",
    "EntropySGD", "Every", "FrobSAM", "GNAMFast", "LookSAM", "Plain", "ProductSAM", "TraceSAM", "UniversalSAM",
    "by_name", "find", "method_names",
]  # fmt: skip

ALIASES = {"gam-norm": "gnam", "gamnorm": "gnam", "cr-sam": "crsam", "sa-sam": "sasam", "sa-sgd": "sasgd"}


def method_names() -> list[str]:
    """The names `wrap` knows."""
    return sorted(Method.registry)


def find(name: str) -> type[Method]:
    """The method of a name."""
    cls = Method.registry.get(ALIASES.get(name.lower(), name.lower()))
    if cls is None:
        close = difflib.get_close_matches(name.lower(), method_names(), n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no method is called {name!r}; {hint}known: {', '.join(method_names())}")
    return cls


def by_name(name: str, **settings: Any) -> Method:
    """Make a method from its name.

    >>> by_name("sam", rho=0.2)
    SAM(rho=0.2, normalize=True)
    """
    cls = find(name)
    try:
        return cls(**settings)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}: {str(error).split('() ')[-1]}") from None
