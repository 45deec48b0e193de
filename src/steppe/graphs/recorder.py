"""Values that change from step to step, as tensors that a recorded step reads: learning rates, schedules."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from ..engine.bases import Together
from ..engine.groups import first_parameter
from ..engine.replicas import replicated
from ..engine.shards import sharded
from ..engine.step import Outcome
from ..method import Method, number_fields
from ..optimizer import SharpnessAware
from ..vector import Space


@dataclass
class RecordedStep:
    """A recorded step: its graph, its inputs, what it leaves behind, and a random state for each of its looks."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    loss: Tensor
    outcome: Outcome
    look_states: list[torch.Generator]

    def results(self) -> tuple[Tensor, dict[str, Any]]:
        """Copies of loss and metrics of the last replay. The next replay of any recording overwrites the originals."""
        metrics = self.outcome.metrics
        names = [name for name, value in metrics.items() if isinstance(value, Tensor)]
        loss, *values = torch._foreach_mul([self.loss, *(metrics[name] for name in names)], 1)
        return loss, {**metrics, **dict(zip(names, values, strict=True))}


class LiveNumbers:
    """Learning rates and scheduled values as tensors, which are written before each replay of a recorded step."""

    def __init__(self, opt: SharpnessAware, method: Method, whole: bool):
        self._opt = opt
        first = first_parameter(opt.param_groups)
        self._zero = Space([first]).zero()
        self._schedules: list[tuple[Callable[..., Any], Tensor, list[float]]] = []
        self._method = self._with_tensors(method)
        groups: list[Any] = opt.param_groups if whole and "lr" not in method.needs else []
        # float32, whatever the default dtype is: fused kernels read their learning rate as float32.
        self._lrs = [(torch.zeros((), dtype=torch.float32, device=first.device), [float("nan")]) for _ in groups]
        self.refresh()

    def _with_tensors(self, method: Method) -> Method:
        """The method with every schedule replaced by one that always returns the same tensor."""
        values: dict[str, Any] = {}
        for f in fields(method):
            value = getattr(method, f.name)
            if isinstance(value, Method):
                values[f.name] = self._with_tensors(value)
            elif f.name in number_fields(type(method)) and callable(value):
                number = self._zero.clone()
                self._schedules.append((value, number, [float("nan")]))
                values[f.name] = _Constant(number)
        return replace(method, **values) if values else method

    def refresh(self) -> None:
        """Write the values of this step, where they have changed."""
        groups = self._opt.param_groups
        for (number, last), group in zip(self._lrs, groups, strict=False):
            _write_if_changed(number, float(group["lr"]), last)
        for schedule, number, last in self._schedules:
            _write_if_changed(number, float(schedule(self._opt.steps, groups[0].get("lr"))), last)

    @contextlib.contextmanager
    def in_use(self) -> Generator[None, None, None]:
        """A context in which the optimizer uses the tensors instead of numbers, for recording."""
        opt, method = self._opt, self._opt.method
        lrs = [group.get("lr") for group in opt.param_groups]
        opt.method = self._method
        for group, (number, _) in zip(opt.param_groups, self._lrs, strict=False):
            group["lr"] = number
        try:
            yield
        finally:
            opt.method = method
            if self._lrs:
                for group, lr in zip(opt.param_groups, lrs, strict=True):
                    group["lr"] = lr


@dataclass(frozen=True)
class _Constant:
    """A schedule that always returns the same tensor."""

    number: Tensor

    def __call__(self, step: int, lr: Any) -> Tensor:
        return self.number


def _write_if_changed(number: Tensor, value: float, last: list[float]) -> None:
    """Write a value into a tensor, unless it is the last value written, which `last` holds."""
    if value != last[0]:
        number.fill_(value)
        last[0] = value


def obstacle(opt: SharpnessAware) -> str:
    """The reason why steps of this optimizer cannot be recorded; empty if none is known."""
    params: list[Tensor] = [p for group in opt.param_groups for p in group["params"]]
    if not all(p.is_cuda for p in params):
        return "the parameters are not on a CUDA device"
    if len({p.device for p in params}) > 1:
        return "the parameters are on several devices"
    if replicated(opt.model) is not None or any(sharded(p) for p in params):
        return "the model is spread over processes (DistributedDataParallel or FSDP2)"
    if opt.home == "cpu":
        return 'the weights are copied to the host (home="cpu")'
    return ""


def make_recordable(opt: SharpnessAware) -> bool:
    """Let the base optimizer keep its state and learning rate on the device; return whether that is possible."""
    if isinstance(opt.base, Together):
        return False  # several base optimizers step eagerly
    base, groups = opt.base, opt.param_groups
    hooks = (*opt._optimizer_step_pre_hooks, *opt._optimizer_step_post_hooks)
    hooks += (*base._optimizer_step_pre_hooks, *base._optimizer_step_post_hooks)
    if hooks or type(base).__module__.split(".")[:2] != ["torch", "optim"]:
        return False  # hooks must run in every step, and optimizers of other libraries may count steps in Python
    fused = type(base) in (SGD, Adam, AdamW) and not any(group.get("differentiable") for group in groups)
    if not fused and not all("capturable" in group for group in groups):
        return False
    for group in groups:
        if fused:
            group["fused"], group["foreach"] = True, None
        if "capturable" in group:
            group["capturable"] = True
            base._warned_capturable_if_run_uncaptured = True
    for p, state in base.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(p.device)
    return True
