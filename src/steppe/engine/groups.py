"""What the base optimizer's parameter groups say: their parameters, settings of ours in them, step count and seed."""

from __future__ import annotations

from operator import index
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from . import checks

STEP, SEED = "steppe_step", "steppe_seed"  # keys in the first group: there they survive every kind of checkpoint
_OWN = (SEED, "rho", "perturb", "adaptive")  # keys of ours in any group


class Groups:
    """The base's parameter groups, as they are now: the base owns them, and anybody may change them."""

    def __init__(self, base: Optimizer, seed: int):
        self._base = base
        for group in base.param_groups:
            checks.check_group(group)
        self._first_before: dict[str, Any] = base.param_groups[0]
        self._first_before.setdefault(STEP, 0)
        self._first_before.setdefault(SEED, index(seed))  # a plain int: numpy's overflow, and cannot be loaded safely

    def __iter__(self) -> Any:
        return iter(self._base.param_groups)

    def first(self) -> dict[str, Any]:
        """The first group. If it is not the one it was (groups may be removed), our keys move to it."""
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
        """Of the method's random vectors."""
        return self.first().setdefault(SEED, 0)

    def count_step(self) -> None:
        """A step was taken."""
        self._base.param_groups[0][STEP] = self.steps + 1

    def set_lr(self, lr: Any) -> Any:
        """Set the learning rate of all groups: to a tensor where the base takes one, else to a number."""
        takes_tensor = all(group.get("fused") or group.get("capturable") for group in self)
        lr = lr if takes_tensor else float(lr)  # other bases would wait for the device themselves
        for group in self:
            group["lr"] = lr
        return lr

    def add(self, group: dict[str, Any]) -> dict[str, Any]:
        """Add a group to the base, if it is a good one; returns it as the base keeps it."""
        self._base.add_param_group(group)
        added = self._base.param_groups[-1]
        try:
            checks.check_group(added)
        except Exception:
            del self._base.param_groups[-1]
            raise
        return added

    def call(self, name: str) -> None:
        """Call a method of the base, or of each of several, that has one of this name."""
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
        """What each trainable parameter's group says."""
        return [group.get(key, default) for group in self for p in group["params"] if p.requires_grad]

    def rho(self) -> list[Any] | None:
        """The radius that each trainable parameter's group asks for; None if no group does."""
        ours = "rho" not in self._base.defaults  # else it is the base's own: Adadelta has one
        return self.by_parameter("rho") if ours and any("rho" in group for group in self) else None

    def flags(self) -> tuple[list[bool] | None, list[bool] | None]:
        """For each trainable parameter whether looks may move it, and whether it is measured in its own size."""
        if not any("perturb" in group or "adaptive" in group for group in self):
            return None, None
        return self.by_parameter("perturb", True), self.by_parameter("adaptive", True)

    def own_settings(self) -> list[dict[str, Any]]:
        """The settings of ours in each group."""
        ours = [key for key in _OWN if key not in self._base.defaults]
        return [{key: group[key] for key in ours if key in group} for group in self]

    def restore_own(self, settings: list[dict[str, Any]]) -> None:
        """After loading a checkpoint of the base alone, which knows nothing of ours: keep these, count from zero."""
        if STEP in self._base.param_groups[0]:
            return
        for group, kept in zip(self, settings, strict=True):
            group.update(kept)
        self._base.param_groups[0][STEP] = 0
