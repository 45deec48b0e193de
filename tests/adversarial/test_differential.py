"""Random nets, data, settings, groups and ways to step, each against equations typed again in plain float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import steppe
from helpers import problems, references
from helpers.adversarial import chance, trials
from helpers.problems import Data, by_backward_closure, by_closure, by_passes, weights
from steppe.engine.random_vectors import Draws
from steppe.vector import Space

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
VARIANTS = problems.all_variants()


def random_net(draw, inputs):
    """One to four layers, some without bias, with any of some smooth activations."""
    torch.manual_seed(draw.randrange(1000))
    sizes = [inputs, *(draw.randint(2, 12) for _ in range(draw.randint(0, 3))), 10]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, bias=draw.random() < 0.7), draw.choice([nn.Tanh, nn.Softplus, nn.SiLU])()]
    return nn.Sequential(*layers[:-1]).double()


def random_data(draw, steps):
    """Some pixels of some digits, in batches of some size."""
    images, labels = problems.digits()
    pixels = draw.sample(range(64), draw.randint(3, 40))

    def batch(size):
        rows = draw.sample(range(len(images)), size)
        return images[rows][:, pixels], labels[rows]

    size = draw.randint(4, 40)
    return len(pixels), [Data(batch(size), batch(size)) for _ in range(steps)]


def by_micro_batches(opt, model, data):
    """Two unequal micro-batches, as a list of closures; single examples are not split."""

    def parts(x, y):
        cut = len(x) // 3 + 1
        return [
            lambda p=p: problems.loss(model, p) * len(p[0]) / len(x)
            for p in ((x[:cut], y[:cut]), (x[cut:], y[cut:]))
        ]  # fmt: skip

    opt.step(parts(*data.main), auxiliary=parts(*data.auxiliary), sample=data.closures(model)["sample"])


STYLES = [by_closure, by_backward_closure, by_passes, by_micro_batches]


def random_method(draw):
    """Any method in a setting that it declares, with another radius."""
    method = draw.choice(VARIANTS)
    if method.radius and isinstance(getattr(method, method.radius), float):
        method = replace(method, **{method.radius: draw.uniform(0.01, 0.4)})
    return method


class NaiveSGD:
    """SGD, on one flat vector."""

    def __init__(self, momentum, decay):
        self.momentum, self.decay, self.buffer = momentum, decay, None

    def step(self, w, direction, lr, aside):
        d = direction + self.decay * w
        self.buffer = d if self.buffer is None else self.momentum * self.buffer + d
        return w - lr * self.buffer - lr * aside


def off(actual, expected):
    return float(((actual - expected).abs() / (1e-9 + 1e-7 * expected.abs())).max())


@pytest.mark.parametrize("part", range(3))
def test_any_method_in_any_setting_is_its_equations(part):
    wrong = []
    for number in trials(10):
        draw = chance("methods", part, number)
        method, style = random_method(draw), draw.choice(STYLES)
        home: Any = draw.choice(["device", "cpu"])
        if "hvp" in method.needs:
            style = by_closure  # exact products need closures that return a graph
        if "sample" in method.needs and style is by_micro_batches:
            style = by_closure
        inputs, data = random_data(draw, steps=4)
        model = random_net(draw, inputs)
        alone = "lr" in method.needs
        naive = NaiveSGD(0.0 if alone else draw.choice([0.0, 0.9]), 0.0 if alone else draw.choice([0.0, 0.01]))
        base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=naive.momentum, weight_decay=naive.decay)
        opt = steppe.SharpnessAware(base, method, model, hvp="exact", home=home)
        state, w, worst = {}, weights(model), 0.0
        for step, d in enumerate(data):
            draws = Draws(Space(list(model.parameters())), seed=0, step=step)
            lr = float(base.param_groups[0]["lr"])
            problem = references.Problem(
                model, d, step, lr, lambda kind, *a, draws=draws: problems.flat(getattr(draws, kind)(*a).tensors)
            )
            found = getattr(references, method.name.lower())(problem, w, method, state)
            direction, aside = found if isinstance(found, tuple) else (found, torch.zeros_like(w))
            w = naive.step(w, direction, state.get("lr", lr), aside)
            style(opt, model, d)
            worst = max(worst, off(weights(model), w))
            w = weights(model)  # errors do not add up
        if worst > 1:
            wrong.append((number, method, style.__name__, home, worst))
    assert wrong == []


def random_groups(draw, model):
    """One to four groups of parameters; each may have a radius of its own, be left alone, or be measured plainly."""
    groups: list[dict] = [{"params": []} for _ in range(draw.randint(1, 4))]
    for p in model.parameters():
        draw.choice(groups)["params"].append(p)
    groups = [group for group in groups if group["params"]]
    for group in groups:
        if draw.random() < 0.4:
            group["rho"] = draw.uniform(0.0, 0.5)
        if draw.random() < 0.3:
            group["perturb"] = False
        if draw.random() < 0.3:
            group["adaptive"] = False
    return groups


def offsets(groups, grads, rho, adaptive, eta):
    """e of SAM or ASAM by groups: a norm over all weights that may move, each group's own radius."""
    scaled = {}
    for group in groups:
        for p in group["params"]:
            t = p.detach().abs() + eta if adaptive and group.get("adaptive", True) else torch.ones_like(p)
            scaled[p] = (t, t * grads[p] if group.get("perturb", True) else torch.zeros_like(p))
    norm = torch.cat([tg.flatten() for _, tg in scaled.values()]).norm()
    return {
        p: group.get("rho", rho) * scaled[p][0] * scaled[p][1] / (norm + 1e-12)
        for group in groups
        for p in group["params"]
    }


def test_groups_of_any_kind():
    wrong = []
    for number in trials(20):
        draw = chance("groups", number)
        inputs, data = random_data(draw, steps=3)
        model = random_net(draw, inputs)
        adaptive, rho, eta = draw.random() < 0.5, draw.uniform(0.01, 0.3), 0.01
        groups = random_groups(draw, model)
        method = steppe.ASAM(rho=rho, eta=eta) if adaptive else steppe.SAM(rho=rho)
        opt = steppe.SharpnessAware(torch.optim.SGD([dict(g) for g in groups], lr=0.1), method, model)
        for d in data:
            params = list(model.parameters())
            loss = problems.loss(model, d.main)
            grads = dict(zip(params, torch.autograd.grad(loss, params), strict=True))
            home = [p.detach().clone() for p in params]
            e = offsets(groups, grads, rho, adaptive, eta)
            with torch.no_grad():
                for p in params:
                    p.add_(e[p])
            there = torch.autograd.grad(problems.loss(model, d.main), params)
            with torch.no_grad():
                for p, w in zip(params, home, strict=True):
                    p.copy_(w)
            expected = torch.cat([(w - 0.1 * g).flatten() for w, g in zip(home, there, strict=True)])
            draw.choice(STYLES)(opt, model, d)
            if off(weights(model), expected) > 1:
                wrong.append((number, method, [{k: v for k, v in g.items() if k != "params"} for g in groups]))
    assert wrong == []


def test_the_settings_are_random_enough():
    """Every method can be drawn, and a radius is drawn where there is one."""
    drawn = {random_method(chance("methods", part, number)).name for part in range(3) for number in range(400)}
    assert drawn == {method.name for method in VARIANTS}
