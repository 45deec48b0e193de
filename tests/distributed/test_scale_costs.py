"""The costs that the documentation counts for a large model are those of a small one under FSDP2."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.meshes import BLOCKS, batches, blocks, loss_of, part_of
from helpers.pages import making
from steppe import FSAM, SharpnessAware
from steppe.method import remembered_vectors

costs = making("scale_costs")
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


def local_bytes(tensors):
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)


class Collectives(TorchDispatchMode):
    """Counts what is sent between ranks. (torch's CommDebugMode fails in a second forward pass.)"""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def small_model() -> tuple[Any, DeviceMesh]:
    """Blocks that are gathered one by one, and a last one that belongs to the whole."""
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), blocks()
    for block in list(model)[:-1]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), mesh


def step_counted(opt, model, mesh):
    x, y = part_of(batches(1)[0], mesh)
    with Collectives() as counted:
        needed = {"auxiliary": lambda: loss_of(model(x), y)} if "auxiliary" in opt.method.needs else {}
        opt.step(lambda: loss_of(model(x), y), **needed)
    return counted.counts


@pytest.mark.parametrize("kind", costs.NUMBERS, ids=lambda kind: kind.__name__)
def test_a_step_costs_what_is_counted(kind):
    (model, mesh), method = small_model(), kind()
    entries = sum(p.numel() for p in model.parameters())
    opt = SharpnessAware(torch.optim.AdamW(model.parameters()), method, model)
    step_counted(opt, model, mesh)  # FSDP2 sets itself up in the first
    counts = step_counted(opt, model, mesh)
    expected = costs.cost(method, costs.Model(entries, BLOCKS - 1, dist.get_world_size(), weight_bytes=8))
    found = [counts[name] for name in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)]
    assert found == [expected.gathers, expected.scatters, expected.numbers]
    assert sum(counts.values()) == sum(found)

    both = [torch.zeros(()) for _ in range(2)]

    def per_rank(tensors):
        """Bytes on both ranks, halved: shards are uneven."""
        mine = torch.tensor(float(local_bytes(tensors)))
        dist.all_gather(both, mine)
        return torch.stack(both).mean().item()

    assert per_rank(model.parameters()) == expected.weights
    assert per_rank([p.grad for p in model.parameters()]) == expected.gradients
    moments = [t for state in opt.base.state.values() for t in state.values() if t.dim() > 0]
    assert per_rank(moments) == expected.state
    remembered_bytes = per_rank([t for p in model.parameters() for n, t in opt.state[p].items() if "steppe." in n])
    assert remembered_bytes == remembered_vectors(method) * expected.weights
    assert remembered_bytes <= expected.copies


def test_what_a_method_remembers_of_fsdp2_s_gradients_can_be_copied():
    """FSAM remembers the first gradient itself, which is a view of memory that FSDP2 has taken back."""
    model, mesh = small_model()
    opt = SharpnessAware(torch.optim.AdamW(model.parameters()), FSAM(), model)
    step_counted(opt, model, mesh)
    state = copy.deepcopy(opt.state_dict())
    for p, saved in zip(model.parameters(), state["state"].values(), strict=True):
        for name, value in saved.items():
            if name.startswith("steppe."):
                assert torch.equal(value.to_local(), opt.state[p][name].to_local())
                assert value.to_local().untyped_storage().nbytes() == value.to_local().nbytes
