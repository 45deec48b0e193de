"""What looks on several ranks must not disturb: gradients of other optimizers, buffers, the loss scale."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import steppe
from helpers.ranks import assert_ranks_agree


class Two(nn.Module):
    """Two layers, each for an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(4, 4, dtype=torch.float64) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def data() -> tuple[Tensor, Tensor]:
    """Eight examples, of which every rank has its own four."""
    torch.manual_seed(1)
    return torch.randn(8, 4, dtype=torch.float64), torch.randint(4, (8,))


def own_loss(net: nn.Module) -> Tensor:
    x, y = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in data())
    return F.cross_entropy(net(x), y)


def plain_gradient() -> Tensor:
    """The gradient of the second layer's weights on all examples."""
    alone, (x, y) = Two(), data()
    return torch.autograd.grad(F.cross_entropy(alone(x), y), alone.b.weight)[0]


def sgd(layer: nn.Module, lr: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(layer.parameters(), lr=lr)


@pytest.mark.parametrize("view", [False, True], ids=["copy", "bucket-view"])
def test_another_optimizer_gets_the_first_looks_gradient(view):
    """With bucket views it got the last look's, from the second step on."""
    net = DDP(Two(), gradient_as_bucket_view=view)
    opt, other = steppe.SharpnessAware(sgd(net.module.a), steppe.SAM(rho=0.5), net), sgd(net.module.b)
    for _ in range(3):
        other.zero_grad()
        opt.step(lambda: own_loss(net))
        torch.testing.assert_close(net.module.b.weight.grad, plain_gradient(), rtol=1e-12, atol=1e-15)


def test_another_optimizer_under_fsdp2_after_an_evaluation():
    """FSDP2 keeps the root's weights gathered after a forward without gradients; all looks' gradients were summed."""
    net = Two()
    fully_shard(net.a)
    fully_shard(net)
    opt, other = steppe.SharpnessAware(sgd(net.a), steppe.SAM(rho=0.5), net), sgd(net.b)
    for _ in range(2):
        with torch.no_grad():
            net(data()[0])
        other.zero_grad()
        opt.step(lambda: own_loss(net))
        grad = net.b.weight.grad
        assert isinstance(grad, DTensor)
        torch.testing.assert_close(grad.full_tensor(), plain_gradient(), rtol=1e-12, atol=1e-15)


def test_a_local_ascent_beside_another_optimizer_warns():
    net = DDP(Two())
    opt = steppe.SharpnessAware(sgd(net.module.a), steppe.SAM(rho=0.5), net, local=True)
    with pytest.warns(UserWarning, match="another optimizer trains are those of this rank"):
        opt.step(lambda: own_loss(net))


def test_an_overflow_on_one_rank_skips_the_step_on_all_with_a_local_ascent():
    """In a look that the method needs for its radius alone, so that no gradient of the direction shows it."""
    net = DDP(Two())
    opt = steppe.SharpnessAware(sgd(net, 0.1), steppe.GapSAM(period=1), net, local=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for look in opt.passes(scaler):
        loss = own_loss(net)
        look.report(loss)
        broken = look.batch == "auxiliary" and dist.get_rank() == 1
        scaler.scale(loss * float("inf") if broken else loss).backward()
    scaler.step(opt)
    scaler.update()
    assert opt.steps == 0 and scaler.get_scale() == 2.0
    assert_ranks_agree(net)


def test_exact_products_are_averaged_for_a_ddp_model_inside_the_model():
    net = DDP(Two())
    parts = nn.ModuleList([net, nn.Linear(1, 1)])
    opt = steppe.SharpnessAware(sgd(net, 0.1), steppe.GNAM(), parts, hvp="exact")
    for _ in range(3):
        opt.step(lambda: own_loss(net))
    assert_ranks_agree(net)


def test_exact_products_of_a_local_ascent_are_this_ranks_own():
    """Every rank's direction by itself, averaged by hand."""
    (x, y), method = data(), steppe.GNAM()
    net, alone = DDP(Two()), Two()
    opt = steppe.SharpnessAware(sgd(net), method, net, local=True, hvp="exact")
    opt.gradient(lambda: own_loss(net))
    expected = torch.zeros_like(alone.a.weight)
    for part, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        one = steppe.SharpnessAware(sgd(alone), method, alone, hvp="exact")
        one.gradient(lambda part=part, targets=targets: F.cross_entropy(alone(part), targets))
        assert alone.a.weight.grad is not None
        expected += alone.a.weight.grad / 2
        one.zero_grad()
    torch.testing.assert_close(net.module.a.weight.grad, expected, rtol=1e-12, atol=1e-15)


class Centred(nn.Module):
    """Subtracts a running mean, and notes what it has seen of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("middle", torch.zeros((), dtype=torch.float64))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(self.middle))
        out = self.layer(x) - self.middle
        self.middle = 0.5 * self.middle + 0.5 * x.detach().mean()
        return out


@pytest.mark.parametrize(("method", "settings"), [(steppe.SAM(), {"local": True}), (steppe.GNAM(), {"hvp": "exact"})])
def test_all_looks_of_a_step_see_rank_0s_buffers(method, settings):
    net = DDP(Centred())
    opt = steppe.SharpnessAware(sgd(net, 0.1), method, net, **settings)
    for _ in range(3):
        net.module.seen.clear()
        opt.step(lambda: own_loss(net))
        seen = torch.tensor(net.module.seen, dtype=torch.float64)
        of_rank_0 = seen.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(seen, of_rank_0) and len(seen) >= 2 and len(set(seen.tolist())) == 1
