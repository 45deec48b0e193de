"""Two processes: DDP, DDP with per-process ascent ("m-sharpness"), and FSDP2.

    python examples/distributed.py                                          # starts torchrun itself
    torchrun --standalone --nproc-per-node=2 examples/distributed.py        # the same

Trains scikit-learn's digits on a CPU in well under a minute. The loop is the same for all three; only the wrapping of
the model differs. The table shows how far the weights are from those of one process that sees the whole batch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import steppe

BATCH = 64


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))


def alone() -> tuple[nn.Module, dict]:
    return network(), {}


def ddp() -> tuple[nn.Module, dict]:
    return DistributedDataParallel(network()), {}


def ddp_local() -> tuple[nn.Module, dict]:
    return DistributedDataParallel(network()), {"local": True}


def fsdp2() -> tuple[nn.Module, dict]:
    net = network()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    return net, {}


def train(wrapped: tuple[nn.Module, dict], epochs: int, x: Tensor, y: Tensor, share: slice) -> list[Tensor]:
    """Train on a share of every batch; return the weights."""
    model, settings = wrapped
    base = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)  # after the model is wrapped
    opt = steppe.SharpnessAware(base, steppe.SAM(rho=0.1), model=model, **settings)
    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=order).split(BATCH)[: len(x) // BATCH]:
            mine = batch[share]
            opt.step(lambda mine=mine: F.cross_entropy(model(x[mine]), y[mine]))
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def accuracy(weights: list[Tensor], x: Tensor, y: Tensor) -> float:
    net = network()
    with torch.no_grad():
        for p, value in zip(net.parameters(), weights, strict=True):
            p.copy_(value)
        return (net(x).argmax(1) == y).float().mean().item()


def on_a_rank(epochs: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, labels = load_digits(return_X_y=True)
    x, y = torch.as_tensor(images).float() / 16, torch.as_tensor(labels)
    x, y, x_test, y_test = x[::2], y[::2], x[1::2], y[1::2]
    share = slice(rank, None, ranks)
    whole = train(alone(), epochs, x, y, slice(None))
    table = Table("model", "test accuracy", "distance to one process", "ms a step")
    for wrap in (ddp, ddp_local, fsdp2):
        if rank == 0:
            print(f"training with {wrap.__name__} ...", flush=True)
        started = time.perf_counter()
        weights = train(wrap(), epochs, x, y, share)
        ms = 1e3 * (time.perf_counter() - started) / (epochs * (len(x) // BATCH))
        distance = max((a - b).abs().max().item() for a, b in zip(weights, whole, strict=True))
        table.add_row(wrap.__name__, f"{accuracy(weights, x_test, y_test):.1%}", f"{distance:.1e}", f"{ms:.1f}")
    if rank == 0:
        Console().print(table)
        print("ddp and fsdp2 equal one process up to rounding.")
        print("In ddp_local each process perturbs by the gradient of its own half of the batch, so its weights differ.")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # FSDP2 keeps gloo's threads alive, and one that runs while Python exits can abort the process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    if "RANK" in os.environ:
        on_a_rank(args.epochs)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        sys.exit(subprocess.run([*torchrun, __file__, f"--epochs={args.epochs}"], env=environment).returncode)


if __name__ == "__main__":
    main()
