"""A net, data and an optimizer for tests of recorded steps."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import steppe
from helpers import problems
from helpers.problems import seeded


def data(device, count, dtype=torch.float32, size=32):
    def batch(b):
        return b[0].to(device, dtype), b[1].to(device)

    days = problems.steps(9, size, dtype)
    return [problems.Data(batch(d.main), batch(d.auxiliary)) for d in (days * (count // 9 + 1))[:count]]


def net():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Softplus(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(288, 10),
    )  # fmt: skip


def make(method, device="cuda", base: Any = torch.optim.SGD, dtype=torch.float32, **settings):
    model = seeded(net, dtype=dtype).to(device)
    settings.setdefault("lr", 0.05 if base is torch.optim.SGD else 0.01)
    if base is torch.optim.SGD and "lr" not in method.needs:
        settings.setdefault("momentum", 0.9)
    if device == "cuda" and base in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        settings["fused"] = True  # as captured steps have it
    return model, steppe.SharpnessAware(base(model.parameters(), **settings), method, model)


def loss_of(model):
    return lambda x, y: F.cross_entropy(model(x), y)


def auxiliary(method, day):
    return {"auxiliary": day.auxiliary} if "auxiliary" in method.needs else {}


def with_sgd_for_gamma(method):
    """Adam's bias correction is a number that changes on a CPU; on a GPU it is on the device."""
    values = {f.name: getattr(method, f.name) for f in fields(method)}
    inner = {k: with_sgd_for_gamma(v) for k, v in values.items() if isinstance(v, steppe.Method)}
    if isinstance(method, steppe.GAM):
        inner["optimizer"] = partial(torch.optim.SGD, lr=0.01)
    return replace(method, **inner) if inner else method
