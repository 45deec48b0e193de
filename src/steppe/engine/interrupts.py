"""After an interrupt or a `break`: perturbed weights are not saved, and loaded weights are not overwritten."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..support.wrappers import uncompiled


class Recovers(Protocol):
    """A step that can restore the weights."""

    def before_saving(self) -> None:
        """Restore them before they are saved."""
        ...

    def close(self) -> None:
        """End the step, and restore everything."""
        ...


class _RecoverFirst:
    """A hook on a model's `state_dict` or `load_state_dict`. A pickled or copied model gets `_DoNothing` instead."""

    def __init__(self, step: Recovers, loading: bool):
        self._step, self._loading = weakref.ref(step), loading

    def __call__(self, *_: Any) -> None:
        if (step := self._step()) is not None:
            if self._loading:
                step.close()
            else:
                step.before_saving()

    def __reduce__(self) -> tuple[type[_DoNothing], tuple[()]]:
        return _DoNothing, ()


class _DoNothing:
    """A hook that does nothing."""

    def __call__(self, *_: Any) -> None: ...


def recover_before_saving(step: Recovers, model: nn.Module | None) -> None:
    """Let a model's `state_dict` and `load_state_dict` first restore what an interrupted step has left.

    The hooks are set on the model and on the module inside its wrappers. Hooks of earlier optimizers are replaced.
    """
    inner = uncompiled(model)
    within = inner.module if isinstance(inner, DistributedDataParallel) else None
    for module in {id(m): m for m in (model, inner, within) if isinstance(m, nn.Module)}.values():
        for hooks in (module._state_dict_pre_hooks, module._load_state_dict_pre_hooks):  # pyright: ignore[reportPrivateUsage]
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "hook", hook), (_RecoverFirst, _DoNothing)):
                    del hooks[key]
        module.register_state_dict_pre_hook(_RecoverFirst(step, loading=False))
        module.register_load_state_dict_pre_hook(_RecoverFirst(step, loading=True))
