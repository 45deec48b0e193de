"""The precision in which a model computes its gradients, on which the step of a finite difference depends."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .replicas import fully_sharded


class Precision:
    """Detects the precision. It watches a look while it runs, because autocast may be entered anywhere in it."""

    def __init__(self, model: nn.Module | None, modules: Sequence[nn.Module], params: Sequence[Tensor]):
        self._model, self._modules, self._params = model, modules, params
        self._autocast: torch.dtype | None = None

    @contextlib.contextmanager
    def noting(self) -> Generator[None, None, None]:
        """The context of a look: note whether autocast is on anywhere in it."""
        self._autocast = self._autocast_now()
        if self._model is None:
            yield
            return

        def note(*_: object) -> None:
            self._autocast = self._autocast_now() or self._autocast

        # Hooks on submodules too, for a forward that enters autocast itself; not if compiled, which would recompile.
        watched = [self._model]
        if not any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in self._modules):
            watched += [m for m in self._modules if m._parameters]
        hooks = [module.register_forward_pre_hook(note) for module in watched]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _autocast_now(self) -> torch.dtype | None:
        device_type = self._params[0].device.type
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None

    def name(self) -> str:
        """The name of the coarsest dtype that gradients are computed in. TF32 counts as float16."""
        dtypes = {p.dtype for p in self._params} | {self._autocast} - {None}
        policies = [getattr(m._get_fsdp_state(), "_mp_policy", None) for m in self._modules if fully_sharded(m)]
        dtypes |= {getattr(policy, "param_dtype", None) for policy in policies} - {None}
        for dtype in (torch.bfloat16, torch.float16):
            if dtype in dtypes:
                return str(dtype).removeprefix("torch.")
        if torch.float32 not in dtypes:
            return "float64"
        convolves = self._model is None or any(isinstance(m, _ConvNd) for m in self._modules)
        tf32 = self._params[0].is_cuda and (
            torch.get_float32_matmul_precision() != "highest" or (convolves and torch.backends.cudnn.allow_tf32)
        )
        return "float16" if tf32 else "float32"
