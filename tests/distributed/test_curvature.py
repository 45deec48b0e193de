"""Two ranks with unequal shares of the data measure what one process with all of it measures."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers.curvature_problems import digits, mlp
from steppe.curvature import Hessian, eigenvalues, surrogate_gap, trace


def model() -> nn.Module:
    torch.manual_seed(0)
    return mlp(4).double()


def mine() -> tuple[Tensor, Tensor]:
    """This rank's share: 7 samples or 33."""
    x, y = digits(40, side=4)
    part = slice(0, 7) if dist.get_rank() == 0 else slice(7, 40)
    return x[part], y[part]


def vector(H: Hessian) -> Tensor:
    return torch.linspace(-1, 1, H.shape[0], dtype=torch.float64)


def assert_ranks_equal(value: object) -> None:
    ranks: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, value)
    assert ranks[0] == ranks[1]


def test_two_ranks_measure_what_one_does():
    H = Hessian(nn.parallel.DistributedDataParallel(model()), F.cross_entropy, mine(), group=dist.group.WORLD)
    alone = Hessian(model(), F.cross_entropy, digits(40, side=4))
    product = H @ vector(H)
    assert torch.allclose(product, alone @ vector(alone), atol=1e-13)
    loss, top = float(H.objective.loss()), eigenvalues(H, 2).values.tolist()
    whole, gap = trace(H, rtol=0.05).value, surrogate_gap(H.objective, 0.05).gap
    assert_ranks_equal((product.tolist(), loss, top, whole, gap))
    assert loss == pytest.approx(float(alone.objective.loss()), rel=1e-12)
    assert top == pytest.approx(eigenvalues(alone, 2).values.tolist(), rel=1e-8)
    assert whole == pytest.approx(trace(alone, rtol=0.05).value, rel=1e-8)
    assert gap == pytest.approx(surrogate_gap(alone.objective, 0.05).gap, rel=1e-8)


def test_a_product_takes_one_all_reduce(monkeypatch):
    H = Hessian(model(), F.cross_entropy, mine(), group=dist.group.WORLD)
    reduce, calls = dist.all_reduce, []
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: (calls.append(1), reduce(*args, **kwargs))[1])
    _ = H @ vector(H)
    assert len(calls) == 1


def test_a_loss_that_is_not_finite_is_refused_on_every_rank():
    H = Hessian(model(), lambda output, _: output.sum() * torch.nan, mine(), group=dist.group.WORLD)
    with pytest.raises(ValueError, match="the loss is nan at these weights"):
        _ = H @ vector(H)


def test_a_sharded_model_is_refused_with_advice_that_works():
    sharded = copy.deepcopy(model())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(TypeError, match=r"is sharded.*get_model_state_dict"):
        Hessian(sharded, F.cross_entropy, mine())
    plain = mlp(4).double()
    plain.load_state_dict(get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True)))
    gathered, H = (Hessian(net, F.cross_entropy, mine(), group=dist.group.WORLD) for net in (plain, model()))
    assert torch.equal(gathered @ vector(gathered), H @ vector(H))
