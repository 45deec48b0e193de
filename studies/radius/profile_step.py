"""Where a population's step spends its time on a GPU."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from nets import Net
from population import Base, Population
from torch.profiler import ProfilerActivity, profile

from steppe import SAM
from steppe.lab.models import build


def main(members: int = 28) -> None:
    """CNN-5, batch 100, SAM."""
    torch.set_float32_matmul_precision("high")
    shape = (3, 32, 32)
    model = build("cnn-5", shape, 10)
    row = torch.cat([p.detach().flatten() for p in model.parameters()]).cuda()
    weights = row.repeat(members, 1)
    net = Net(model)
    statistics = net.fresh_statistics(weights)
    x = torch.randn(members, 100, 32, 32, 3, device="cuda")
    y = torch.randint(10, (members * 100,), device="cuda")

    def losses(w, batch, first):
        logits = net(w, batch, statistics if first else None, update=first)
        return F.cross_entropy(logits.flatten(0, 1), y, reduction="none").view(members, -1).mean(1)

    population = Population(weights, SAM(rho=0.1), Base("adam", 1e-3), losses)
    for _ in range(5):
        population.step(x)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        population.step(x)
    torch.cuda.synchronize()
    print(f"{(time.perf_counter() - began) / 20 / members * 1e3:.3f} ms a step and member, {members} members")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            population.step(x)
        torch.cuda.synchronize()
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=70))


if __name__ == "__main__":
    main()
