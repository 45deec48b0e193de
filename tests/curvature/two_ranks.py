"""One of two ranks: prints what it measured on its half of the data. Run by test_distributed.py."""

from __future__ import annotations

import copy
import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers.curvature_problems import digits, mlp
from steppe.curvature import Hessian, eigenvalues, surrogate_gap, trace


def of_a_sharded_model(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> dict[str, object]:
    """What is said about an FSDP2 model, and the product by the advice that is given."""
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    try:
        Hessian(sharded, F.cross_entropy, data)
        said = ""
    except TypeError as error:
        said = str(error)
    plain = mlp(4).double()
    plain.load_state_dict(get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True)))
    H = Hessian(plain, F.cross_entropy, data, group=dist.group.WORLD)
    return {"said": said, "gathered": (H @ torch.linspace(-1, 1, H.shape[0], dtype=torch.float64)).tolist()}


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = mlp(4).double()
    x, y = digits(40, side=4)
    mine = slice(0, 7) if rank == 0 else slice(7, 40)  # unequal shares
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    H = Hessian(wrapped, F.cross_entropy, (x[mine], y[mine]), group=dist.group.WORLD)
    calls = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(1), reduce(*args, **kwargs))[1]
    product = H @ torch.linspace(-1, 1, H.shape[0], dtype=torch.float64)
    once = len(calls)
    result = {
        "reductions": once,
        "product": product.tolist(),
        "loss": float(H.objective.loss()),
        "top": eigenvalues(H, 2).values.tolist(),
        "trace": trace(H, rtol=0.05).value,
        "gap": surrogate_gap(H.objective, 0.05).gap,
    }
    try:
        Hessian(model, lambda o, t: o.sum() * torch.nan, (x[mine], y[mine]), group=dist.group.WORLD) @ product
    except ValueError as error:
        result["nan"] = str(error)[:20]
    result |= of_a_sharded_model(model, (x[mine], y[mine]))
    print("RESULT" + json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
