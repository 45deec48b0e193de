"""SAM with its copy of the weights on the GPU and in the host's memory: peak memory, and time of a step.

    python benchmarks/host_copy.py [--device cuda|cpu] [--batches 16 32] [--rounds N] [--small]

A transformer language model of a billion parameters, as such models are trained: float32 weights, bfloat16 autocast,
fused AdamW, checkpointed activations, sequences of 512 tokens. For each batch size: AdamW alone, SAM with
home="device" and SAM with home="cpu". Memory is the peak of the bytes requested from the allocator in one step after
warm-up. Times are medians over rounds in which the three alternate. All three step the same model. Tokens are random.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from charts import Chart, Page, Record, count, device_of
from common import RESULTS, Step, environment, pick_device, show_table, timed, write_json
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import steppe

LENGTH, VOCABULARY = 512, 32000
MOST_MEMORY, MOST_TIME = 1.02, 1.15  # targets: peak memory relative to the base, time relative to a copy on the GPU
BASE, HERE, THERE = "AdamW", 'SAM, home="device"', 'SAM, home="cpu"'


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = max(1, width // 128)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the two linear layers."""
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, dim=2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Decoder(nn.Module):
    """A language model: width 2048 and depth 18 have 0.97 billion parameters with the embedding, which is tied."""

    def __init__(self, vocabulary: int, width: int, depth: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each next token."""
        x = self.tokens(tokens[:, :-1]) + self.places[: tokens.shape[1] - 1]
        for block in self.blocks:
            x: Any = checkpoint(block, x, use_reentrant=False)
        scores = F.linear(self.last(x), self.tokens.weight)
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def contenders(model: nn.Module, base: torch.optim.Optimizer, batch: Tensor) -> dict[str, Step]:
    """The three steps, on the same weights and the same state of AdamW."""

    def loss() -> Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16):
            return model(batch)

    def plain() -> None:
        loss().backward()
        base.step()
        base.zero_grad()

    def sam(home: Any) -> Step:
        opt = steppe.SharpnessAware(base, steppe.SAM(rho=0.05), model, home=home)

        def step() -> None:
            opt.step(loss)
            opt.zero_grad()

        return step

    return {BASE: plain, THERE: sam("cpu"), HERE: sam("device")}


def peak(step: Step, device: torch.device) -> int:
    """Bytes requested at the peak of one step."""
    if device.type != "cuda":
        step()
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.peak"])


def measure(model: nn.Module, base: torch.optim.Optimizer, batch: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Peaks and times of the three."""
    device, found = batch.device, dict[str, dict[str, Any]]()
    gc.collect()  # frees the optimizers of the previous batch size, with their copies
    steps = contenders(model, base, batch)
    for name, step in steps.items():  # the copy on the device comes last: it stays allocated
        step()
        step()
        found[name] = {"contender": name, "batch": len(batch), "peak_bytes": peak(step, device)}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            samples[name].append(timed(step, 1, device))
    for name, values in samples.items():
        found[name] |= {"seconds": statistics.median(values), "samples": values}
    return [found[name] for name in (BASE, HERE, THERE)]


def verdict(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Memory relative to the base, and time relative to SAM with the copy on the device."""
    by = {row["contender"]: row for row in rows}
    return {
        "memory_over_base": by[THERE]["peak_bytes"] / max(1, by[BASE]["peak_bytes"]),
        "device_memory_over_base": by[HERE]["peak_bytes"] / max(1, by[BASE]["peak_bytes"]),
        "time_over_device": by[THERE]["seconds"] / by[HERE]["seconds"],
    }


# The documentation's page


def charts(record: Record, name: str) -> Iterator[Chart]:
    """Peak memory over the base's, and time over that with the copy on the device, by batch size."""
    title = f"{count(record['parameters'])} parameters, {LENGTH} tokens per sequence, {device_of(record)}"
    groups = {f"{batch} sequences": found for batch, found in record["over"].items()}
    memory = {
        group: {HERE: found["device_memory_over_base"], THERE: found["memory_over_base"]}
        for group, found in groups.items()
    }
    yield Chart(f"{name}-memory", title, "peak memory", memory, "AdamW alone")
    times = {group: {THERE: found["time_over_device"]} for group, found in groups.items()}
    yield Chart(f"{name}-time", title, "time of a step", times, 'home="device"')


PAGE = Page(
    "Weights kept on the host",
    'Peak memory and time of a SAM step on a large transformer with home="cpu", which keeps the copy of the weights in '
    "pinned host memory, and with the copy on the GPU. A step waits for one transfer of the weights, so that it costs "
    "less the longer a look takes.",
    charts,
    place=8,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 16, 32, 64], help="sequences in a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a toy, to try the script")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    device, start = pick_device(args.device), time.perf_counter()
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(100, 32, 2) if args.small else Decoder(VOCABULARY, 2048, 18)
    base = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    size = sum(p.numel() for p in model.parameters())
    results, over = list[dict[str, Any]](), dict[str, dict[str, float]]()
    for batch in args.batches:
        tokens = torch.randint(model.tokens.num_embeddings, (batch, LENGTH + 1), device=device)
        rows = measure(model, base, tokens, args.rounds)
        results += rows
        over[str(batch)] = verdict(rows)
        cells = [(r["contender"], f"{r['peak_bytes'] / 1e9:.2f}", f"{r['seconds'] * 1e3:.1f}") for r in rows]
        show_table(f"{count(size)} parameters, {batch} sequences", ("step", "peak, GB", "milliseconds"), cells)
        print({key: round(value, 4) for key, value in over[str(batch)].items()}, f"{time.perf_counter() - start:.0f} s")
    within = [f["memory_over_base"] <= MOST_MEMORY and f["time_over_device"] <= MOST_TIME for f in over.values()]
    met = [batch for batch, good in zip(args.batches, within, strict=True) if good]
    print(f"within {MOST_MEMORY} of the base's memory and {MOST_TIME} of the time: batches of {met or 'no size'}")
    content = {"environment": environment(device), "parameters": size, "over": over, "results": results}
    write_json(args.results / f"host_copy-{device.type}.json", content)


if __name__ == "__main__":
    main()
