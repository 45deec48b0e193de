"""Base optimizers by name: torch's, timm's and pytorch-optimizer's, your own function, or Muon together with AdamW.

>>> find_base("AdamW").__name__, full_name("sgd"), base_label("mine:make")
('AdamW', 'sgd', 'make')
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from ...support.errors import UserError, unknown, user_function

MUON_AND_ADAMW = "muon+adamw"
_ADABELIEF = (("adabelief_pytorch", "AdaBelief"), ("pytorch_optimizer", "AdaBelief"), ("timm.optim", "AdaBelief"))
_OTHERS = ("timm.optim", "pytorch_optimizer")
_UNFIT = ("Optimizer", "LBFGS", "SparseAdam")  # LBFGS needs several losses per step, SparseAdam sparse gradients
_NAMES = {"adabelief": "AdaBelief", MUON_AND_ADAMW: "Muon + AdamW"}


def torch_bases() -> dict[str, Callable[..., Optimizer]]:
    """The optimizers of torch that can be a base, by name in lower case."""
    return {name: cls for name, cls in _classes(torch.optim).items() if cls.__name__ not in _UNFIT}


def check_base(name: str) -> None:
    """Raise for a name that cannot be a base. A name of the form package.module:function is not imported yet."""
    known = [*torch_bases(), "adabelief", MUON_AND_ADAMW]
    if ":" not in name and name not in known:
        packages = [package.partition(".")[0] for package in _OTHERS]
        missing = [name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is None]
        install = " or ".join(name.replace("_", "-") for name in missing)
        error = unknown("base", name, known)
        raise UserError(f"{error} (more bases: pip install {install})") if install else error


def full_name(name: str) -> str:
    """The name of a base for a recipe: torch's in lower case, others with their module, such as timm.optim:Lamb."""
    lower = name.lower().replace(" ", "")
    if ":" in name:
        return name
    if lower in torch_bases() or lower in _NAMES:
        return lower
    for package in _OTHERS:
        try:
            found = _classes(importlib.import_module(package)).get(lower)
        except Exception:  # not only ImportError: a torchvision for another torch fails in other ways
            continue
        if found is not None:
            return f"{package}:{found.__name__}"
    return lower


def find_base(name: str) -> Callable[..., Any]:
    """The class or function that makes the base."""
    if name.lower() in torch_bases():
        return torch_bases()[name.lower()]
    if name == MUON_AND_ADAMW:
        return muon_and_adamw
    if name != "adabelief":
        return user_function("base", name)
    for package, attribute in _ADABELIEF:
        try:
            return getattr(importlib.import_module(package), attribute)
        except Exception:
            continue
    raise UserError("base adabelief comes from another package: pip install timm (or pytorch-optimizer)")


def base_label(name: str) -> str:
    """The name of a base in tables."""
    if name in torch_bases():
        return torch_bases()[name].__name__
    return _NAMES.get(name) or name.rpartition(":")[2]


def muon_and_adamw(params: Any, lr: float, weight_decay: float = 0.0) -> list[Optimizer]:
    """Muon for matrices, AdamW for the output layer and everything else, both with one learning rate.

    The output layer is the last matrix. Muon's steps are scaled to the size of AdamW's, so that one rate fits both.
    """
    if not hasattr(torch.optim, "Muon"):
        raise UserError(f"base {MUON_AND_ADAMW} needs torch 2.9 or newer")
    params = list(params)
    matrices = [p for p in params if p.ndim == 2][:-1]
    chosen = {id(p) for p in matrices}
    rest = [p for p in params if id(p) not in chosen]
    muon: Any = torch.optim.Muon
    made = [muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")] if matrices else []
    return [*made, torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay)]


def _classes(module: ModuleType) -> dict[str, Any]:
    found = inspect.getmembers(module, inspect.isclass)
    return {name.lower(): cls for name, cls in found if issubclass(cls, Optimizer)}
