"""GapSAM's equations, implemented again in plain float64 tensors; see `references`."""

from __future__ import annotations

import math

import torch


def gapsam(p, w, m, state):
    """ρ follows the held-out gap; sums since the last update and running means are kept in `state`."""
    rho = state.setdefault("rho", torch.tensor(m.least, dtype=w.dtype))
    g = p.g(w)
    at = w + rho * g / (g.norm() + 1e-12)
    here, there = p.loss(w).detach(), p.loss(at).detach()
    sums = state.setdefault("sums", [0.0, 0.0, 0])
    sums[0], sums[1], sums[2] = sums[0] + here, sums[1] + (there - here), sums[2] + 1
    if p.step % m.period == 0:
        update(m, p.step, state, sums[0] / sums[2], sums[1] / sums[2], p.loss(w, "auxiliary").detach())
        state["sums"] = [0.0, 0.0, 0]
    return p.g(at)


def update(m, step, state, loss, rise, held):
    """The next ρ, from the means of the loss and of the rise since the last update, and the held-out loss."""
    first = state.setdefault("first", held)
    over, lowest, highest = 0.0, -1.0, 1.0
    if m.epoch_steps:
        turn, over = share_of_turn(step, m.epoch_steps)
        lowest, highest = (0.0 if over < 0.25 else -1.0), 2.0
        begins = turn != state.get("turn")
        if begins or turn < 2 or over < 0.125:
            if begins:
                state["turn"], state["offsets"] = turn, []
            state["offsets"].append(held - loss)
            for name in ("means", "weight", "best"):
                state.pop(name, None)
            return
    offsets = state.get("offsets", [0.0])
    means = state.get("means", [0.0, 0.0, 0.0])
    new = (loss, rise, held)
    state["means"] = [m.decay * old + (1 - m.decay) * value for old, value in zip(means, new, strict=True)]
    state["weight"] = m.decay * state.get("weight", 0.0) + 1 - m.decay
    loss, rise, held = (value / state["weight"] for value in state["means"])
    gap = held - loss - sum(offsets) / len(offsets)
    ratio = math.log(max(min(m.times * gap, m.ceiling * (first - loss)), 1e-12) / max(rise, 1e-12))
    rho = state["rho"]
    best = state.setdefault("best", [held + 1, loss, rho])
    if held < best[0]:
        state["best"], state["bounded"] = [held, loss, rho], False
    elif m.backtrack and held > (1 + m.backtrack) * best[0] and loss > (1 + m.backtrack) * best[1]:
        state["bounded"] = True
    new_rho = rho * math.exp(m.rate * min(max(ratio, lowest), highest))
    if state["bounded"]:
        new_rho = min(new_rho, max(state["best"][2], rho * math.exp(-m.rate)))
    state["rho"] = torch.as_tensor(new_rho).clamp(m.least, m.most)


def share_of_turn(step, epoch_steps):
    """Turns begin with epochs 1, 2, 4, 8 …: which one a step is in, and how much of it is over."""
    epoch, begin, turn = 1 + step / epoch_steps, 1, 0
    while epoch >= 2 * begin:
        begin, turn = 2 * begin, turn + 1
    return turn, (epoch - begin) / begin
