"""An optimizer around a small net, and a method with memory, for several tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from helpers import problems
from helpers.problems import by_closure, seeded, sgd, weights
from steppe import HERE, SAM, Look, Method, SharpnessAware, ascent


@dataclass(frozen=True)
class Remembering(Method):
    """Remembers a vector and a number, to test how memory is kept, saved and loaded."""

    cost = 2

    def looks(self, ctx):
        here = yield HERE
        m = 0.5 * ctx.memory["m"] + here.grad
        ctx.remember(m=m, count=ctx.memory["count"] + 1)
        there = yield Look(0.1 * ascent(m))
        return there.grad

    def memory(self, space):
        return {"m": space.zeros(), "count": torch.zeros(())}


def make(method=None, base=sgd, build=problems.mlp, **settings):
    model = seeded(build)
    return model, SharpnessAware(base(model), method or SAM(rho=0.1), model, **settings)


def run(model, opt, count=3, start=0):
    for data in problems.steps(start + count)[start:]:
        by_closure(opt, model, data)
    return weights(model)
