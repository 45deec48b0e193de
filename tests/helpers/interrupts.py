"""Ctrl-C in the middle of a step: what raises it, how steps are taken, and what must hold afterwards."""

from __future__ import annotations

import copy
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import steppe
from helpers.problems import same

PACKAGE = str(Path(steppe.__file__).parent)


class AtPlace:
    """Raises KeyboardInterrupt before the k-th line (or operation) of steppe's own code that is executed."""

    def __init__(self, k: int, operations: bool = False):
        self.left, self.operations, self.fired = k, operations, False

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = self.operations
        if event == ("opcode" if self.operations else "line"):
            self.left -= 1
            if self.left == 0:
                self.fired = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)


class AfterSeconds:
    """A real signal after some time, wherever Python is by then: in steppe, in torch, in the loop around them."""

    def __init__(self, seconds: float):
        self.seconds, self.fired, self._armed = seconds, False, False

    def _raise(self, *_: Any) -> None:
        if self._armed:
            self._armed, self.fired = False, True
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._raise)
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, max(self.seconds, 1e-6))

    def __exit__(self, *_: Any) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)


def by_closure(opt, model, x):
    opt.step(lambda: model(x).square().mean())


def by_loop(opt, model, x):
    for _ in opt.passes():
        model(x).square().mean().backward()
    opt.step()


RECOVER: dict[str, Callable[[Any, Any], Any]] = {
    "opt.state_dict": lambda opt, model: opt.state_dict(),
    "opt.zero_grad": lambda opt, model: opt.zero_grad(),
    "model.state_dict": lambda opt, model: model.state_dict(),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Dropout(0.5), nn.Softplus(), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()


def state_of(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Weights; buffers and random state."""
    return [p.detach().clone() for p in model.parameters()], [
        *(b.clone() for b in model.buffers()), torch.get_rng_state()
    ]  # fmt: skip


class Trial:
    """The second step of a training, which can be repeated and interrupted at any place."""

    def __init__(self, how, method, recover, **settings):
        self.how, self.recover = how, recover
        self.model = net()
        momentum = 0.0 if "lr" in method.needs else 0.9
        # foreach: the base changes the weights in one operation, so that an interrupt does not leave half of a step
        base = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=momentum, weight_decay=1e-3, foreach=True)
        self.opt = steppe.SharpnessAware(base, method, self.model, **settings)
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(6, 3, dtype=torch.float64, generator=generator) for _ in range(2)]
        how(self.opt, self.model, self.batches[0])  # allocates what steps reuse
        self.before = state_of(self.model)
        model, opt = copy.deepcopy((self.model, self.opt))
        start = time.perf_counter()
        how(opt, model, self.batches[1])
        self.seconds = time.perf_counter() - start
        self.after = state_of(model)

    def right_after(self, interrupt: AbstractContextManager[None]) -> bool:
        """Whether a step that is interrupted leaves everything as it is before or after a whole step.

        Between the looks and the base's step, buffers and random state are those after it and weights those before.
        """
        model, opt = copy.deepcopy((self.model, self.opt))
        torch.set_rng_state(self.before[1][-1])
        with suppress(KeyboardInterrupt), interrupt:
            self.how(opt, model, self.batches[1])
        self.recover(opt, model)
        enabled = torch.is_grad_enabled() and all(m.training for m in model.modules())
        enabled &= all(p.requires_grad for p in model.parameters())
        torch.set_grad_enabled(True)
        weights, others = state_of(model)
        whole = same(others, self.after[1]) and (same(weights, self.before[0]) or same(weights, self.after[0]))
        return enabled and (whole or (same(weights, self.before[0]) and same(others, self.before[1])))

    def wrong(self, stride: int, operations: bool = False, start: int = 1) -> list[int]:
        """The places, of every `stride`-th one, at which an interrupt leaves something wrong."""
        wrong, k = [], start
        while True:
            interrupt = AtPlace(k, operations)
            if not self.right_after(interrupt):
                wrong.append(k)
            if not interrupt.fired:
                assert k > 100
                return wrong
            k += stride
