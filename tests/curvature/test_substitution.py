"""What an objective may meet in a model and its loss, and that it leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steppe.curvature import Hessian, Objective


def twice() -> nn.Module:
    """A net that runs one of its modules three times; all of them have a name of their own."""
    layer = nn.Linear(3, 3, dtype=torch.float64)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    model.register_module("alias", layer)
    return model


def tiny(rows: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 3, dtype=torch.float64), torch.randint(3, (rows,))


def test_a_module_with_several_names_is_left_as_it_was():
    """`torch.func.functional_call` left the last weights that were tried in it, as plain tensors."""
    torch.manual_seed(0)
    model, data = twice(), tiny()
    before = [(p, p.detach().clone()) for p in model.parameters()]
    objective = Objective(model, F.cross_entropy, data)
    moved = objective.loss(objective.vector(torch.ones(objective.size, dtype=torch.float64)))
    now = list(model.parameters())
    assert all(p is q and torch.equal(p, value) for p, (q, value) in zip(now, before, strict=True))
    with torch.no_grad():
        for p in now:
            p.add_(1.0)
    torch.testing.assert_close(moved, F.cross_entropy(model(data[0]), data[1]).detach(), rtol=1e-12, atol=0)


def test_plain_attributes_and_new_buffers_are_left_as_they_were():
    class Keeps(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.seen = self.weight + 0
            self.register_buffer("late", input.detach())
            return super().forward(input)

    model = Keeps(3, 3, dtype=torch.float64)
    model.seen = there = torch.zeros(3, 3, dtype=torch.float64)
    Objective(model, F.cross_entropy, tiny()).gradient()
    assert model.seen is there and not dict(model.named_buffers())


def test_a_loss_may_be_a_function_of_the_weights():
    """An L2 penalty was left out: the Hessian was that of the loss without it, and so was a loss elsewhere."""
    torch.manual_seed(0)
    model, data = nn.Linear(3, 3, dtype=torch.float64), tiny()

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + 0.5 * sum(p.square().sum() for p in model.parameters())

    bare, whole = (Hessian(Objective(model, loss, data)).dense() for loss in (F.cross_entropy, penalised))
    torch.testing.assert_close(whole, bare + torch.eye(12, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_other_parameters_under_the_same_names_are_measured():
    """After `load_state_dict(assign=True)` the objective still measured the ones of before."""
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double() for _ in range(2))
    objective = Objective(model, F.cross_entropy, tiny())
    model.load_state_dict(other.state_dict(), assign=True)
    assert float(objective.loss()) == float(Objective(other, F.cross_entropy, tiny()).loss())
    model[2] = nn.Linear(4, 5).double()
    with pytest.raises(RuntimeError, match=r"2\.weight is gone or has another shape"):
        objective.loss()


def test_neurons_that_change_places_are_other_weights():
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.Tanh(), layer)
    objective = Objective(model, F.cross_entropy, tiny())
    before = objective.fingerprint()
    with torch.no_grad():
        layer.weight.copy_(layer.weight.flip(1))
    assert objective.fingerprint() != before


class OfBatch(nn.CrossEntropyLoss):
    """A loss of a batch, whose targets are its second part or have a name."""

    def __init__(self, name: str | None, **settings: Any):
        super().__init__(**settings)
        self.name = name

    def forward(self, input: Tensor, target: Any) -> Tensor:
        return super().forward(input, target[1 if self.name is None else self.name])


@pytest.mark.parametrize(
    "settings",
    [{"ignore_index": 0}, {"weight": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}],
    ids=["ignore_index", "weight"],
)
@pytest.mark.parametrize("name", ["labels", "targets", "target", None])
def test_settings_of_the_loss_count_with_forward_too(settings, name):
    torch.manual_seed(0)
    net, (x, y) = nn.Linear(3, 3, dtype=torch.float64), tiny()
    pairs = [(x[:2], y[:2]), (x[2:], y[2:])]
    batches = pairs if name is None else [{"x": a, name: b} for a, b in pairs]

    def forward(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0] if name is None else batch["x"])

    found = Objective(net, OfBatch(name, **settings), batches, forward=forward).loss()
    torch.testing.assert_close(found, F.cross_entropy(net(x), y, **settings).detach(), rtol=1e-12, atol=0)


def test_a_weight_of_the_users_own_loss_is_no_class_weight():
    class Halved(nn.Module):
        weight = 0.5

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return self.weight * F.cross_entropy(output, target)

    torch.manual_seed(0)
    net, (x, y) = nn.Linear(3, 3, dtype=torch.float64), tiny()
    found = Objective(net, Halved(), (x, y)).loss()
    torch.testing.assert_close(found, 0.5 * F.cross_entropy(net(x), y).detach())


def test_regression_targets_of_minus_100_are_targets():
    torch.manual_seed(0)
    net, x = nn.Linear(3, 1, dtype=torch.float64), tiny()[0]
    y = torch.tensor([-100, 5, -100, 2, 1, 7, -100]).reshape(-1, 1)
    found = Objective(net, F.l1_loss, [(x[:2], y[:2]), (x[2:], y[2:])]).loss()
    torch.testing.assert_close(found, F.l1_loss(net(x), y).detach(), rtol=1e-12, atol=0)
