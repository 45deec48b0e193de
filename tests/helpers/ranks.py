"""Data, models, methods and comparisons for the tests on two ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import steppe
from steppe import HERE, Look, Method, Number, SharpnessAware, ascent

STEPS = 4
BATCH = 32

# Data


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    detour: bool = False  # whether the net takes its detour: if not, the detour's weights get no gradient

    def part(self, i: int, n: int) -> Batch:
        """The i-th of n equal parts."""
        return Batch(self.x.chunk(n)[i], self.y.chunk(n)[i], self.detour)

    @property
    def mine(self) -> Batch:
        """This rank's half."""
        return self.part(dist.get_rank(), dist.get_world_size())


def digits(dtype: torch.dtype = torch.float64, steps: int = STEPS, detour: bool = False) -> list[Batch]:
    """Batches of handwritten digits. With `detour`, every second step takes it, the first does not."""
    x, y = _images_and_labels()
    chunks = zip((x / 16).to(dtype).split(BATCH), y.split(BATCH), range(steps), strict=False)
    return [Batch(images, labels, detour and step % 2 == 1) for images, labels, step in chunks]


@functools.cache
def _images_and_labels() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x[:512]), torch.tensor(y[:512])


# Models


class Net(nn.Module):
    """A small classifier with odd sizes: on two ranks all shards are uneven, and one has no entry at all."""

    def __init__(self, dtype: torch.dtype = torch.float64, detour: bool = False, norm: bool = False):
        super().__init__()
        generator_state = torch.get_rng_state()
        torch.manual_seed(7)
        self.first = nn.Linear(64, 7)
        self.norm = nn.BatchNorm1d(7) if norm else nn.Identity()
        self.middle = nn.Linear(7, 5)
        self.last = nn.Linear(5, 10)
        self.heat = nn.Parameter(torch.full((1,), 1.5))
        self.detour = nn.Linear(7, 10) if detour else None
        self.to(dtype)
        torch.set_rng_state(generator_state)

    def forward(self, x: Tensor, detour: bool = False) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        out = self.heat * self.last(torch.tanh(self.middle(hidden)))
        return out + self.detour(hidden) if detour and self.detour is not None else out


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(net(batch.x, batch.detour), batch.y)


def average_over_ranks(p: Tensor) -> None:
    assert p.grad is not None
    dist.all_reduce(p.grad)
    p.grad.div_(dist.get_world_size())


def sharded(
    net: Net,
    reshard_after_forward: bool | None = None,
    reshard_after_backward: bool = True,
    unsharded: Iterable[nn.Parameter] = (),
    mesh: dist.device_mesh.DeviceMesh | None = None,
) -> Net:
    """The net under FSDP2. Parameters in `unsharded` stay whole; their gradients are averaged by a hook."""
    unsharded = set(unsharded)
    whole_net: Any = net
    for module in (net.first, net.middle, net):
        fully_shard(module, reshard_after_forward=reshard_after_forward, ignored_params=unsharded, mesh=mesh)
    for p in (p for p in unsharded if p.requires_grad):
        p.register_post_accumulate_grad_hook(average_over_ranks)
    if not reshard_after_backward:
        whole_net.set_reshard_after_backward(False)
    return net


DDP_KINDS: dict[str, dict] = {
    "default": {},
    "bucket-view": {"gradient_as_bucket_view": True},
    "static-graph": {"static_graph": True},
    "static-graph-bucket-view": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused-parameters": {"find_unused_parameters": True},
    "unused-parameters-bucket-view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "tiny-buckets": {"bucket_cap_mb": 0.0005},
}

# Base optimizers, each with a dtype of its own: the engine hands both the same gradient, whatever it computed it in.

BASES: dict[str, Callable] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=1e-2),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
RUNS = {"adamw float64": ("adamw", torch.float64), "sgd float32": ("sgd", torch.float32)}

# Methods


def all_methods() -> dict[str, Method]:
    """Every setting that every method of the library wants tested, by a name that is the same in all processes."""
    library = {c.__name__: c for c in Method.registry.values() if c.__module__.startswith("steppe.methods")}
    return {f"{name}-{i}": method for name in sorted(library) for i, method in enumerate(library[name].variants())}


@dataclass(frozen=True)
class Drift(Method):
    """A method with memory of both kinds, a vector and a number. Losing either changes its direction."""

    rho: Number = 0.05
    beta: Number = 0.7

    cost = 2

    def memory(self, space: steppe.Space):
        return {"mean": space.vector([None] * len(space.params)), "size": torch.zeros((), dtype=torch.float64)}

    def looks(self, ctx: steppe.Context):
        here = yield HERE
        mean = self.beta * ctx.memory["mean"] + (1 - self.beta) * here.grad
        size = self.beta * ctx.memory["size"] + (1 - self.beta) * here.grad.norm()
        ctx.remember(mean=mean, size=size)
        there = yield Look(self.rho * ascent(mean))
        return there.grad + (0.1 * size) * mean


@dataclass(frozen=True)
class Keeper(Method):
    """Keeps gradients while it looks elsewhere, and asserts that they do not change."""

    cost = 3

    def looks(self, ctx: steppe.Context):
        here = yield HERE
        here_copy = here.grad.clone()
        there = yield Look(0.5 * ascent(here.grad))
        there_copy = there.grad.clone()
        yield Look(-0.5 * ascent(here.grad))
        assert_identical(here.grad.tensors, here_copy.tensors)
        assert_identical(there.grad.tensors, there_copy.tensors)
        return here.grad


# Ways to take a step


def by_loss(opt: SharpnessAware, net: nn.Module, batch: Batch) -> None:
    opt.step(lambda: loss_of(net, batch))


def by_backward(opt: SharpnessAware, net: nn.Module, batch: Batch) -> None:
    def closure() -> Tensor:
        loss = loss_of(net, batch)
        loss.backward()
        return loss

    opt.step(closure)


def by_passes(opt: SharpnessAware, net: nn.Module, batch: Batch) -> None:
    for _ in opt.passes():
        loss_of(net, batch).backward()
    opt.step()


def by_halves(opt: SharpnessAware, net: nn.Module, batch: Batch) -> None:
    opt.gradient(lambda: loss_of(net, batch))
    opt.step()


def by_list(opt: SharpnessAware, net: nn.Module, batch: Batch) -> None:
    def micro(i: int) -> Callable[[], Tensor]:
        return lambda: loss_of(net, batch.part(i, 2)) / 2

    opt.step([micro(0), micro(1)])


def by_list_with_backward(opt: SharpnessAware, net: nn.Module, batch: Batch) -> None:
    def micro(i: int) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            loss = loss_of(net, batch.part(i, 2)) / 2
            loss.backward()
            return loss

        return closure

    opt.step([micro(0), micro(1)])


def by_loop_in_passes(opt: SharpnessAware, net: nn.Module, batch: Batch) -> None:
    for _ in opt.passes():
        with net.no_sync() if isinstance(net, DDP) else contextlib.nullcontext():
            (loss_of(net, batch.part(0, 2)) / 2).backward()
        (loss_of(net, batch.part(1, 2)) / 2).backward()
    opt.step()


def by_first_done(opt: SharpnessAware, net: nn.Module, batch: Batch) -> None:
    opt.zero_grad()
    opt.begin()
    loss_of(net, batch).backward()
    opt.gradient(lambda: loss_of(net, batch), first_done=True)
    opt.step()


FORMS = [by_loss, by_backward, by_passes, by_halves, by_list, by_list_with_backward, by_loop_in_passes, by_first_done]


def train(opt: SharpnessAware, net: nn.Module, batches: Iterable[Batch], form: Callable = by_loss) -> None:
    """Train on this rank's half of each batch."""
    for batch in batches:
        form(opt, net, batch.mine)


def only_this_rank() -> Any:
    """The group of this rank alone, for an optimizer that trains by itself although there are two ranks."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def train_any(opt: SharpnessAware, net: nn.Module, batches: list[Batch], alone: bool = False) -> None:
    """Train with any method, with whatever it needs besides the batch. `alone`: in one process, on whole batches."""
    if alone and "loss" in opt.method.needs:
        opt.loss_group = only_this_rank()
    for batch, other in zip(batches, batches[1:] + batches[:1], strict=True):
        mine, second = (batch, other) if alone else (batch.mine, other.mine)
        needed = {
            "auxiliary": lambda second=second: loss_of(net, second),
            "sample": lambda i, batch=batch: loss_of(net, Batch(batch.x[i : i + 1], batch.y[i : i + 1])),
        }
        opt.step(lambda mine=mine: loss_of(net, mine), **{k: f for k, f in needed.items() if k in opt.method.needs})


def tolerance_of(method: Method) -> float:
    """The tolerance in float64. A method that takes differences amplifies rounding by 1e5 and more."""
    return 1e-6 if {"loss", "hvp"} & method.needs else 1e-12


# Comparing


def whole(net: nn.Module) -> list[Tensor]:
    """All weights, gathered, as a copy."""
    return gathered([p.detach() for p in net.parameters()])


def gathered(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of tensors, made whole where they are sharded over the ranks."""
    tensors = list(tensors)
    mine = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    if not any(isinstance(t, DTensor) for t in tensors):
        return [t.clone() for t in mine]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    pieces = zip(tensors, zip(*ranks, strict=True), strict=True)
    return [torch.cat(piece) if _is_spread(t) else piece[dist.get_rank()].clone() for t, piece in pieces]


def _is_spread(t: Tensor) -> bool:
    if not isinstance(t, DTensor):
        return False
    placements = zip(t.placements, t.device_mesh.shape, strict=True)
    return any(placement.is_shard() and size > 1 for placement, size in placements)


def assert_close(net: nn.Module, expected: nn.Module | list[Tensor], tolerance: float) -> None:
    """All weights agree, relative to the largest of all."""
    expected = whole(expected) if isinstance(expected, nn.Module) else expected
    size = max(w.abs().max() for w in expected)
    errors = [((a - b).abs().max() / size).item() for a, b in zip(whole(net), expected, strict=True)]
    names = [name for name, _ in net.named_parameters()]
    off = {name: error for name, error in zip(names, errors, strict=True) if not error <= tolerance}
    assert not off, f"weights differ by more than {tolerance}: {off}"


def assert_identical(a: Iterable[Tensor], b: Iterable[Tensor]) -> None:
    """The same bits."""
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x, y), f"tensor {i} of shape {tuple(x.shape)} differs by {(x - y).abs().max().item()}"


def assert_ranks_agree(net: nn.Module) -> None:
    """The same weights, to the bit, on all ranks."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, whole(net))
    for name, a, b in zip(dict(net.named_parameters()), *ranks, strict=True):
        assert torch.equal(a, b), f"the ranks' {name} differ by {(a - b).abs().max().item()}"


@contextlib.contextmanager
def unchanged(net: nn.Module, opt: SharpnessAware | None = None) -> Iterator[None]:
    """A context that must not change weights, buffers, the optimizer's state and its counters, to the bit."""

    def everything() -> list[Tensor]:
        buffers = [b.detach().clone() for b in net.buffers()]
        return whole(net) + buffers + ([] if opt is None else tensors_in(opt.state_dict()))

    before = everything()
    yield
    assert_identical(everything(), before)


def tensors_in(tree: object) -> list[Tensor]:
    """All numbers of a state dict, in order, as whole tensors."""
    return gathered(_leaves(tree))


def _leaves(tree: object) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (int, float)):
        yield torch.tensor(float(tree), dtype=torch.float64)
    elif isinstance(tree, (dict, list, tuple)):
        for item in [tree[key] for key in sorted(tree, key=str)] if isinstance(tree, dict) else tree:
            yield from _leaves(item)
