"""Averages of the weights over training (EMA, SWA), with any method and base: the rival that costs no gradient."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Iterable
from numbers import Integral
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from .engine.shards import sharded
from .support.wrappers import unwrapped

_buffers_of = attrgetter("_buffers")  # a module's own buffers by name, also those that are None


class Averaging:
    """An average of a model's weights. Call `update` after each step of the optimizer.

    Args:
        model: the model that is trained. The average is a copy of it, without the wrappers of DDP and
            `torch.compile`.
        ema: exponential moving average with this decay, w̄ ← βw̄ + (1 − β)w. After n updates β is at most
            (1 + n)/(10 + n), so that the first weights count little in the average of a short training.
        swa_from: instead, the plain mean of the weights after each step from this one on (SWA); 0 averages all.

    It costs one copy of the weights and one pass over them per step; no gradient, no look. With captured steps, call
    `update` after the replay: the weights keep their addresses. Nothing synchronises with the device, which
    `torch.optim.swa_utils.AveragedModel` does in every update. The numbers are the same for SWA, and for EMA without
    the smaller β of the first updates, which `AveragedModel` does not have.

    BatchNorm layers of the averaged model need statistics of their own: call `estimate_batch_norm` before you use it.

    >>> model = nn.Linear(2, 1)
    >>> average = Averaging(model, ema=0.999)
    >>> for _ in range(3):
    ...     average.update()  # after opt.step(...)
    >>> torch.equal(average.model.weight, model.weight)
    True
    """

    def __init__(self, model: nn.Module, *, ema: float | None = None, swa_from: int | None = None):
        if (ema is None) == (swa_from is None):
            raise ValueError("give one of the two, for example ema=0.999 or swa_from=1000")
        if ema is not None and not 0 <= ema < 1:
            raise ValueError(f"the decay ema must be at least 0 and below 1, not {ema!r}")
        whole = isinstance(swa_from, Integral) and not isinstance(swa_from, bool)  # NumPy's are whole numbers too
        if swa_from is not None and not (whole and swa_from >= 0):
            raise ValueError(f"swa_from must be a whole number of steps, at least 0, not {swa_from!r}")
        model = unwrapped(model)
        if any(sharded(p) for p in model.parameters()):
            raise RuntimeError("the weights are sharded (FSDP2) and cannot be copied: average a model without FSDP2")
        self._source, self._ema, self._start = model, ema, swa_from or 0
        self._average = copy.deepcopy(model).requires_grad_(False)
        self._steps = self._averaged = 0  # Python numbers: a counter on the device would synchronise

    @property
    def model(self) -> Any:
        """The averaged model."""
        return self._average

    @property
    def started(self) -> bool:
        """Whether there is an average yet. SWA starts at step `swa_from`."""
        return self._averaged > 0

    def update(self) -> None:
        """Add the current weights to the average. Buffers are copied, not averaged."""
        if self._steps >= self._start:
            n = self._averaged
            share = 1 / (n + 1) if self._ema is None else 1 - min(self._ema, (1 + n) / (10 + n))
            with torch.no_grad():
                pairs = zip(self._average.parameters(), self._source.parameters(), strict=True)
                for averages, weights in _by_dtype_and_device(pairs):
                    if n == 0:
                        torch._foreach_copy_(averages, weights)
                    else:
                        torch._foreach_lerp_(averages, weights, share)
                for averages, now in _by_dtype_and_device(_matched(self._average, self._source)):
                    torch._foreach_copy_(averages, now)
            self._averaged += 1
        self._steps += 1

    def estimate_batch_norm(self, inputs: Iterable[Any]) -> None:
        """Estimate the statistics of the averaged model's BatchNorm layers from batches of training inputs.

        A batch is a tensor of inputs, or a tuple or list that begins with one. The random state is restored.
        """
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        if not norms:
            return
        device = next(self.model.parameters()).device
        on_cpu = device.type == "cpu"  # fork_rng always saves the CPU's state; its device_type must be another
        with torch.random.fork_rng([] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
            training, momenta = self.model.training, [norm.momentum for norm in norms]
            try:
                update_bn(inputs, self.model, device)
            finally:  # if the loader raises, torch leaves the layers without a momentum, in training mode
                self.model.train(training)
                for norm, momentum in zip(norms, momenta, strict=True):
                    norm.momentum = momentum

    @contextlib.contextmanager
    def in_place(self) -> Generator[None, None, None]:
        """A context in which the trained model has the averaged weights and buffers: to evaluate or save it.

        >>> model = nn.Linear(2, 1)
        >>> average = Averaging(model, swa_from=0)
        >>> average.update()
        >>> with average.in_place():
        ...     torch.equal(model.weight, average.model.weight)
        True
        """
        if not self.started:
            raise RuntimeError("there is no average yet: call update() first; `started` says whether there is one")
        with _kept(self._source):
            saved: list[tuple[Tensor, Tensor]] = []
            try:
                with torch.no_grad():
                    parameters = zip(self._source.parameters(), self.model.parameters(), strict=True)
                    pairs = [*parameters, *_matched(self._source, self.model)]
                    saved = [(own, own.clone()) for own, _ in pairs]
                    for own, averaged in pairs:
                        own.copy_(averaged)
                yield
            finally:
                with torch.no_grad():
                    for own, value in saved:
                        own.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """The average and its counters, for a checkpoint."""
        return {"model": self.model.state_dict(), "steps": self._steps, "averaged": self._averaged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the average and its counters from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self._steps, self._averaged = int(state["steps"]), int(state["averaged"])


def _matched(to: nn.Module, source: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Pairs of buffers of two models with the same modules, to be copied from the second to the first.

    A forward may create a buffer, or replace it by one of another shape. In the first model such a buffer is replaced
    by a new copy immediately.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for mine, theirs in zip(to.modules(), source.modules(), strict=True):
        own = dict(_buffers_of(mine))
        for name, value in _buffers_of(theirs).items():
            before = own.get(name)
            if before is not None and value is not None and _alike(before, value):
                pairs.append((before, value))
            elif before is not value or name not in own:
                _buffers_of(mine)[name] = None if value is None else value.detach().clone()
                if name in theirs._non_persistent_buffers_set:
                    mine._non_persistent_buffers_set.add(name)
    return pairs


def _alike(own: Tensor, value: Tensor) -> bool:
    """Whether a value can be written into a tensor. (It cannot if the tensor is expanded.)"""
    kinds = [(t.shape, t.dtype, t.device, t.layout) for t in (own, value)]
    return kinds[0] == kinds[1] and not (own.layout is torch.strided and 0 in own.stride())


@contextlib.contextmanager
def _kept(model: nn.Module) -> Generator[None, None, None]:
    """A context at whose end each name stands for the same buffer as before. (Its values are another matter.)"""
    before = [(module, dict(_buffers_of(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, kept in before:
            now = _buffers_of(module)
            for name in [name for name in now if name not in kept]:
                del now[name]
            for name, buffer in kept.items():
                now[name] = buffer


def _by_dtype_and_device(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Pairs as two lists, grouped by dtype and device, as `torch._foreach` kernels need them."""
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for average, value in pairs:
        own, other = kinds.setdefault((value.dtype, value.device), ([], []))
        own.append(average)
        other.append(value)
    return list(kinds.values())


def parse(text: str) -> tuple[str, float]:
    """Kind and number of an average: its decay (``ema:0.999``), or shares of training (``ema:10%``, ``swa:0.75``).

    ``ema:10%`` forgets over a tenth of all steps: its decay is 1 − 1 / (0.1 · steps). ``swa:0.75`` is the mean of the
    weights after three quarters of training.

    >>> parse("ema:0.99"), parse("ema:10%"), parse("swa")
    (('ema', 0.99), ('ema%', 0.1), ('swa', 0.75))
    """
    kind, _, number = text.partition(":")
    try:
        if kind == "ema" and number.endswith("%"):
            kind, value = "ema%", float(number[:-1]) / 100
        else:
            value = float(number) if number else {"ema": 0.999, "swa": 0.75}[kind]
        if (kind in ("ema", "swa") and 0 <= value < 1) or (kind == "ema%" and 0 < value <= 1):
            return kind, value
    except (KeyError, ValueError):
        pass
    raise ValueError(
        f"average {text!r} is not ema:DECAY (ema:0.999), ema:SHARE% of the steps (ema:10%) or swa:SHARE (swa:0.75)"
    )


def averaging(model: nn.Module, text: str, steps: int) -> Averaging:
    """An `Averaging` from a text such as ``ema:0.999`` or ``swa:0.75``, for a training of `steps` steps."""
    kind, number = parse(text)
    if kind == "swa":
        return Averaging(model, swa_from=round(number * steps))
    return Averaging(model, ema=number if kind == "ema" else max(0.0, 1 - 1 / (number * steps)))
