"""Several base optimizers as one: Muon for the matrices and AdamW for the rest, say."""

# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Together(Optimizer):
    """Steps several optimizers, each on its own parameters. Their parameter groups follow each other in one list.

    The groups are the optimizers' own dictionaries: a scheduler that changes them changes them there.

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
        Optimizer.__setstate__(self, {})  # makes the hook registries; there is no super().__init__ to call

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
        """The settings that any of the optimizers has."""
        return {key: value for base in self.bases for key, value in base.defaults.items()}

    @defaults.setter
    def defaults(self, _: dict[str, Any]) -> None:
        """Each optimizer keeps its own."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step each optimizer."""
        for base in self.bases:
            base.step()

    # torch wraps a step to run hooks. The optimizers' own are wrapped: hooks for all optimizers must not run twice.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of each optimizer."""
        for base in self.bases:
            base.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: it is not known whose group it is."""
        raise RuntimeError("there are several base optimizers: add the group to one of them, opt.base.bases[i]")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all optimizers; each converts its own, as it does alone."""
        if [len(g["params"]) for g in state_dict["param_groups"]] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("the checkpoint's parameter groups are not those of these base optimizers")
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
