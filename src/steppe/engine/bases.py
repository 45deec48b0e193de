"""Several base optimizers as one, for example Muon for the matrices and AdamW for the rest."""

# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Together(Optimizer):
    """Several optimizers, each with its own parameters, as one optimizer. Its parameter groups are those of all.

    The groups are the optimizers' own dictionaries, so that a scheduler changes the optimizers' learning rates.

    >>> weight, bias = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    >>> both = Together([torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([bias], lr=1e-3)])
    >>> [group["lr"] for group in both.param_groups]
    [0.1, 0.001]
    """

    def __init__(self, bases: Sequence[Optimizer]):
        seen: set[int] = set()
        for p in (p for base in bases for group in base.param_groups for p in group["params"]):
            if id(p) in seen:
                raise ValueError("a parameter belongs to two of the base optimizers: each must have its own")
            seen.add(id(p))
        self.bases = list(bases)
        Optimizer.__setstate__(self, {})  # makes the hook registries; super().__init__ would make parameter groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, as a new list."""
        return [group for base in self.bases for group in base.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Give each optimizer as many groups as it has."""
        left = list(groups)
        for base in self.bases:
            count = len(base.param_groups)
            base.param_groups, left = left[:count], left[count:]

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of all optimizers, as a new dictionary."""
        return {p: state for base in self.bases for p, state in base.state.items()}

    @state.setter
    def state(self, state: dict[Tensor, Any]) -> None:
        for base in self.bases:
            own = {id(p) for group in base.param_groups for p in group["params"]}
            base.state.clear()
            base.state.update({p: value for p, value in state.items() if id(p) in own})

    @property
    def defaults(self) -> dict[str, Any]:
        """The default settings of all optimizers, merged.

        Schedulers that cycle the momentum see there where it is, in all groups: in "betas" if all bases have them, else
        in "momentum", from which `step` takes it; and they raise where neither is.
        """
        merged = {key: value for base in self.bases for key, value in base.defaults.items()}
        if not all("betas" in base.defaults for base in self.bases):
            betas = merged.pop("betas", None)
            if not all(base.defaults.keys() & {"momentum", "betas"} for base in self.bases):
                merged.pop("momentum", None)
            elif betas is not None:
                merged.setdefault("momentum", betas[0])
        return merged

    @defaults.setter
    def defaults(self, _: dict[str, Any]) -> None:
        """Ignored: each optimizer keeps its own defaults."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step each optimizer."""
        for base in self.bases:
            for group in base.param_groups if "betas" in base.defaults and "momentum" not in base.defaults else ():
                if "momentum" in group:  # from a scheduler, which cycles the momentum of all groups under one name
                    group["betas"] = (group.pop("momentum"), *group["betas"][1:])
            base.step()

    # torch wraps every step to run the global hooks. They already run around each optimizer's step.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of each optimizer."""
        for base in self.bases:
            base.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: it is unclear which optimizer the group is for."""
        raise RuntimeError("there are several base optimizers: add the group to one of them, opt.base.bases[i]")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all optimizers. Each loads its own part."""
        if [len(g["params"]) for g in state_dict["param_groups"]] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("the checkpoint's parameter groups do not match those of the base optimizers")
        start = 0
        for base in self.bases:
            groups = state_dict["param_groups"][start : start + len(base.param_groups)]
            start += len(groups)
            ids = {key for group in groups for key in group["params"]}
            state = {key: value for key, value in state_dict["state"].items() if key in ids}
            base.load_state_dict({"state": state, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        return {"bases": self.bases}

    def __repr__(self) -> str:
        return f"Together({', '.join(map(repr, self.bases))})"
