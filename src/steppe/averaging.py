"""An average of the weights over training, beside any method and base: the rival that costs no gradient."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from .engine.shards import sharded


class Averaging:
    """Keeps an average of a model's weights. Call `update` after each step of the optimizer.

    Args:
        model: what is trained. The average is a copy of it; DistributedDataParallel's wrapper is left out.
        ema: exponential moving average with this decay, w̄ ← βw̄ + (1 − β)w. Early on β is at most (1 + n)/(10 + n)
            after n updates, so that the first weights do not weigh on the average of a short training.
        swa_from: instead, the plain mean of the weights after each step from this one on (SWA): 0 for all of them.

    It costs one copy of the weights and one pass over them a step; no gradient, no look. Captured steps leave it alone:
    the weights stay where they are, and the update runs after the replay. Nothing waits for the device, which
    `torch.optim.swa_utils.AveragedModel` does in every update; the numbers are the same.

    The averaged net needs statistics of its own in its BatchNorm layers: `estimate_batch_norm`, before it is used.

    >>> model = nn.Linear(2, 1)
    >>> average = Averaging(model, ema=0.999)
    >>> for _ in range(3):
    ...     average.update()  # after opt.step(...)
    >>> torch.equal(average.model.weight, model.weight)
    True
    """

    def __init__(self, model: nn.Module, *, ema: float | None = None, swa_from: int | None = None):
        if (ema is None) == (swa_from is None):
            raise ValueError("give one of ema=0.999 and swa_from=1000")
        if ema is not None and not 0 <= ema < 1:
            raise ValueError(f"the decay ema must be at least 0 and below 1, not {ema!r}")
        if swa_from is not None and (isinstance(swa_from, bool) or not isinstance(swa_from, int) or swa_from < 0):
            raise ValueError(f"swa_from must be a step, a whole number from 0, not {swa_from!r}")
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        if any(sharded(p) for p in model.parameters()):
            raise RuntimeError("the weights are spread over processes (FSDP2) and cannot be copied: average without it")
        self._source, self._ema, self._start = model, ema, swa_from or 0
        self._average = copy.deepcopy(model).requires_grad_(False)
        self._steps = self._averaged = 0  # numbers of the host, so that nothing waits for the device

    @property
    def model(self) -> Any:
        """The averaged net."""
        return self._average

    @property
    def started(self) -> bool:
        """Whether there is an average yet: SWA begins late."""
        return self._averaged > 0

    def update(self) -> None:
        """Take the present weights into the average. Buffers are the model's own."""
        if self._steps >= self._start:
            n = self._averaged
            share = 1 / (n + 1) if self._ema is None else 1 - min(self._ema, (1 + n) / (10 + n))
            with torch.no_grad():
                for averages, weights in _by_kind(self._average.parameters(), self._source.parameters()):
                    if n == 0:
                        torch._foreach_copy_(averages, weights)
                    else:
                        torch._foreach_lerp_(averages, weights, share)
                for averages, now in _by_kind(self._average.buffers(), self._source.buffers()):
                    torch._foreach_copy_(averages, now)
            self._averaged += 1
        self._steps += 1

    def estimate_batch_norm(self, inputs: Iterable[Any]) -> None:
        """Estimate the statistics of the averaged net's BatchNorm layers from batches of training inputs.

        A batch is a tensor of inputs, or a tuple or list that begins with one. Random state is left as it is.
        """
        if not any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            return
        device = next(self.model.parameters()).device
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_kind(device)):
            update_bn(inputs, self.model, device)

    @contextlib.contextmanager
    def in_place(self) -> Generator[None, None, None]:
        """Within it the trained model itself has the averaged weights and buffers: to evaluate or save it.

        >>> model = nn.Linear(2, 1)
        >>> average = Averaging(model, swa_from=0)
        >>> average.update()
        >>> with average.in_place():
        ...     torch.equal(model.weight, average.model.weight)
        True
        """
        pairs = list(zip(self._source.state_dict().values(), self.model.state_dict().values(), strict=True))
        kept = [mine.clone() for mine, _ in pairs]
        try:
            for mine, averaged in pairs:
                mine.copy_(averaged)
            yield
        finally:
            for (mine, _), value in zip(pairs, kept, strict=True):
                mine.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """The average and its counts, for a checkpoint."""
        return {"model": self.model.state_dict(), "steps": self._steps, "averaged": self._averaged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self._steps, self._averaged = int(state["steps"]), int(state["averaged"])


def _by_kind(averages: Iterable[Tensor], values: Iterable[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Both lists, grouped by dtype and device as list kernels need them."""
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for average, value in zip(averages, values, strict=True):
        own, other = kinds.setdefault((value.dtype, value.device), ([], []))
        own.append(average)
        other.append(value)
    return list(kinds.values())


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # what fork_rng takes besides the CPU


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
    """The averaging that a text such as ``ema:0.999`` or ``swa:0.75`` names, for a training of so many steps."""
    kind, number = parse(text)
    if kind == "swa":
        return Averaging(model, swa_from=round(number * steps))
    return Averaging(model, ema=number if kind == "ema" else max(0.0, 1 - 1 / (number * steps)))
