"""The base optimizer's parameter groups: their parameters, and what steppe keeps in them (settings, steps, seed)."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from . import checks

STEP, SEED = "steppe_step", "steppe_seed"  # keys in the first group, where every kind of checkpoint saves them
_OWN = (SEED, "rho", "perturb", "adaptive")  # steppe's settings, which any group may have
# The first group of each base when it was wrapped. A base that still has it is wrapped again. A base with another group
# that has a step count has loaded a checkpoint: that makes new groups.
_wrapped: WeakKeyDictionary[Optimizer, dict[str, Any]] = WeakKeyDictionary()


def first_parameter(groups: Iterable[dict[str, Any]]) -> Tensor:
    """The first parameter of the first group that has any."""
    return next(p for group in groups for p in group["params"])


class Groups:
    """A view of the base's parameter groups. The base owns them, and user code may change them at any time."""

    def __init__(self, base: Optimizer, seed: int):
        self._base = base
        for group in base.param_groups:
            checks.check_group(group)
        self._first_before: dict[str, Any] = base.param_groups[0]
        owner = next(one for one in getattr(base, "bases", [base]) if one.param_groups)
        if _wrapped.get(owner) is self._first_before:  # by another optimizer: this one starts anew
            for key in (STEP, SEED):
                self._first_before.pop(key, None)
        _wrapped[owner] = self._first_before
        self._first_before.setdefault(STEP, 0)
        # A Python int: integers of NumPy overflow, and `torch.load` refuses them with weights_only=True.
        self._first_before.setdefault(SEED, index(seed))

    def __iter__(self) -> Any:
        return iter(self._base.param_groups)

    def first(self) -> dict[str, Any]:
        """The first group. If another group is first now (groups may be removed), steps and seed move to it."""
        first, before = self._base.param_groups[0], self._first_before
        if first is not before:
            first.update({key: before.pop(key) for key in (STEP, SEED) if key in before and key not in first})
            self._first_before = first
        return first

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self.first().setdefault(STEP, 0)

    @property
    def seed(self) -> int:
        """The seed of the method's random vectors."""
        return self.first().setdefault(SEED, 0)

    def count_step(self) -> None:
        """Count a step."""
        self._base.param_groups[0][STEP] = self.steps + 1

    def set_lr(self, lr: Any) -> Any:
        """Set the learning rate of all groups: to a tensor if the base supports it, else to a number. Return it."""
        takes_tensor = all(group.get("fused") or group.get("capturable") for group in self)
        lr = lr if takes_tensor else float(lr)  # synchronises; so would such a base itself
        for group in self:
            group["lr"] = lr
        return lr

    def add(self, group: dict[str, Any]) -> dict[str, Any]:
        """Add a group to the base and return it as the base keeps it. A group that `check_group` refuses is removed."""
        self._base.add_param_group(group)
        added = self._base.param_groups[-1]
        try:
            checks.check_group(added)
        except Exception:
            del self._base.param_groups[-1]
            raise
        return added

    def call(self, name: str) -> None:
        """Call the method of this name of the base, or of each of several bases, if it has one."""
        for base in getattr(self._base, "bases", [self._base]):
            method = getattr(base, name, None)
            if callable(method):
                method()

    def all_params(self) -> list[Tensor]:
        """All parameters, also frozen ones."""
        return [p for group in self for p in group["params"]]

    def trainable(self) -> list[Tensor]:
        """The parameters that require a gradient."""
        return [p for group in self for p in group["params"] if p.requires_grad]

    def by_parameter(self, key: str, default: Any = None) -> list[Any]:
        """The value of a key in the group of each trainable parameter."""
        return [group.get(key, default) for group in self for p in group["params"] if p.requires_grad]

    def rho(self) -> list[Any] | None:
        """The radius in the group of each trainable parameter; None if no group sets one."""
        ours = "rho" not in self._base.defaults  # otherwise it is a setting of the base: Adadelta has a rho
        if not ours or not any("rho" in group for group in self):
            return None
        return [rho for group in self for rho in [checks.radius(group)] for p in group["params"] if p.requires_grad]

    def learning_rates(self) -> list[Any]:
        """The learning rate of each trainable parameter, for a method that steps by it."""
        rates = self.by_parameter("lr")
        if any(rate is None for rate in rates):
            raise RuntimeError("the base optimizer has no learning rate, by which this method steps: use another base")
        return rates

    def flags(self) -> tuple[list[bool] | None, list[bool] | None]:
        """The settings `perturb` and `adaptive` of each trainable parameter; None if no group sets either."""
        if not any("perturb" in group or "adaptive" in group for group in self):
            return None, None
        return self.by_parameter("perturb", True), self.by_parameter("adaptive", True)

    def own_settings(self) -> list[dict[str, Any]]:
        """steppe's settings in each group."""
        ours = [key for key in _OWN if key not in self._base.defaults]
        return [{key: group[key] for key in ours if key in group} for group in self]

    def restore_own(self, settings: list[dict[str, Any]]) -> None:
        """After loading a checkpoint of the plain base, which has none of steppe's keys: restore them, count from 0."""
        if STEP in self._base.param_groups[0]:
            return
        for group, own in zip(self, settings, strict=True):
            group.update(own)
        self._base.param_groups[0][STEP] = 0
