"""Where each millisecond of a training step and of an epoch goes, in the lab's own training loop.

    python benchmarks/where_time_goes.py [--models resnet-18 ...] [--device cuda] [--results FOLDER]

Random images and tokens, SAM, as the lab trains it: steps captured, ResNet-18, ViT and GPT in bf16 and compiled, the
small nets in TF32. Measured for each model:

step: milliseconds, without a profiler; with one, the kernels by kind and the longest ones. What is left of the step's
    time are gaps between kernels. Beside it the limits: the time of the multiplications at the rate that this device
    reaches on large matrices of that precision, and of reading and writing all operations' tensors once at the rate of
    a large copy (fused kernels save some of that).
epoch: the steps; making the batches and everything else on the host that the device waits for; evaluation; writing the
    record and the checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from captured import Traffic, copy_rate, matmul_rate
from charts import Chart, Page, Record, device_of
from common import RESULTS, Spread, environment, interleaved, pick_device, show_table, write_json
from kernels import kernels
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import steppe
from steppe.lab.data.dataset import DataSet, Examples, Split
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.precision import autocast
from steppe.lab.training.run import Run

SMALL: dict[str, Any] = {"batch": 100, "precision": "tf32"}
LARGE: dict[str, Any] = {"batch": 128, "precision": "bf16", "compile": True, "augmentation": "basic"}
MODELS: dict[str, dict[str, Any]] = {
    "mlp-3": SMALL,
    "cnn-5": SMALL,
    "cnn-14": {**SMALL, "augmentation": "basic"},
    "resnet-18": {**LARGE, "base": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4},
    "vit-small": {**LARGE, "base": "adamw"},
    "gpt-124m": {"batch": 8, "precision": "bf16", "compile": True, "base": "adamw", "task": "language"},
}
DTYPES = {"tf32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16}
TOKENS, LENGTH, GPT_STEPS = 50257, 1024, 60  # GPT-2's vocabulary and context; batches in its epoch
LONGEST = 15


class Block(nn.Module):
    """A block of GPT-2: attention, then two linear layers, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inwards, self.outwards = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map N x T x width to the same shape."""
        query, key, value = self.inwards(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outwards(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2's smallest size, 124 million parameters, without dropout."""

    def __init__(self, tokens: int, length: int, width: int = 768, depth: int = 12, heads: int = 12):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, N x T, to logits."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def gpt(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model, by the name of this function in a recipe of the lab."""
    return GPT(classes, input_shape[0])


def data_for(name: str, device: torch.device, examples: int, batch: int) -> DataSet:
    """Random images of CIFAR-10's size; for GPT, random tokens, as many as make an epoch."""
    if name == "gpt-124m":
        tokens = torch.randint(TOKENS, ((GPT_STEPS + 2) * batch, LENGTH + 1), device=device)
        train, test = tokens[: GPT_STEPS * batch], tokens[GPT_STEPS * batch :]
        splits = [Examples(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in (train, test)]
        return DataSet("random tokens", splits[0], splits[1], TOKENS, tokens=True)
    parts = []
    for count in (examples, examples // 5):
        images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, device=device)
        parts.append(Split(images, torch.randint(10, (count,), device=device)))
    return DataSet("random images", parts[0], parts[1], 10, mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))


def recipe_of(name: str, method: str) -> Recipe:
    model = f"{Path(__file__).stem}:gpt" if name == "gpt-124m" else name
    return Recipe(data="cifar10", model=model, method=method, epochs=3, **MODELS[name])


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_model(name: str, device: torch.device, examples: int, rates: dict[str, float]) -> dict[str, Any]:
    """A step and an epoch of SAM, and a plain step."""
    recipe = recipe_of(name, "sam")
    if device.type == "cpu":
        recipe = replace(recipe, compile=False)
    data = data_for(name, device, examples, recipe.batch)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(recipe, Path(folder), device=str(device), data=data)
        epoch = timed_epoch(run, device)
    batch = next(iter(run.batches.of_epoch(1)))[:2]
    sam = time_of(run, batch, device)
    found: dict[str, Any] = {"model": name, "batch": recipe.batch, "precision": recipe.precision}
    found |= {"compiled": recipe.compile, "parameters": sum(p.numel() for p in run.net.parameters())}
    if device.type == "cuda":
        found |= kernels(lambda: run.step(*batch), 10, LONGEST)
    # The same run goes on without SAM: a second one would compile for another half a minute.
    run.optimizer.method = steppe.Plain()
    found |= {"milliseconds": asdict(sam), "plain_milliseconds": asdict(time_of(run, batch, device))}
    found |= work(run, batch, device)
    if device.type == "cuda":
        rate = rates["bf16" if recipe.precision == "bf16" else "tf32"]
        found["multiplications_ms"] = 2e3 * found["flops_of_a_pass"] / rate
        found["memory_ms"] = 2e3 * found["bytes_of_a_pass"] / rates["bytes"]
    epoch["parts"] = parts_of(epoch, sam.median / 1e3)
    return {**found, "epoch": epoch}


def time_of(run: Run, batch: tuple[Tensor, Tensor], device: torch.device) -> Spread:
    """Milliseconds of a step, which is recorded first if it is not yet."""
    for _ in range(4):
        run.step(*batch)
    if device.type == "cuda" and not run._step.how.startswith("replayed"):
        raise SystemExit(f"{run.recipe.model}: {run._step.how}")
    return Spread.of(interleaved({"step": lambda: run.step(*batch)}, device, 15, 0.0)["step"], 1e3)


def timed_epoch(run: Run, device: torch.device) -> dict[str, Any]:
    """The second epoch of a run (in the first, steps are compiled and recorded), and its parts, in seconds."""
    going = run.train()
    for _ in range(run.batches.steps + 1):  # with the first step of the second epoch, so that the first has ended
        next(going)
    wait(device)
    began, first = time.perf_counter(), run.record["epochs"][-1]["seconds"]
    for _ in range(run.batches.steps):
        next(going)
    wait(device)
    whole = time.perf_counter() - began
    loop = run.record["epochs"][-1]["seconds"] - first
    run.evaluate()
    wait(device)
    began = time.perf_counter()
    run.evaluate()
    wait(device)
    evaluation = time.perf_counter() - began
    run.model.train()
    examples = run.batches.steps * run.recipe.batch
    return {"steps": run.batches.steps, "seconds": whole, "loop": loop, "evaluation": evaluation, "examples": examples}


def parts_of(epoch: dict[str, Any], step: float) -> dict[str, float]:
    """The parts of an epoch, in seconds. The loop's own clock ends before evaluation, record and checkpoint."""
    steps = min(epoch["steps"] * step, epoch["loop"])
    parts = {"steps": steps, "batches, and waiting for the host": epoch["loop"] - steps}
    parts["evaluation"] = epoch["evaluation"]
    parts["record and checkpoint"] = max(epoch["seconds"] - epoch["loop"] - epoch["evaluation"], 0.0)
    return parts


def work(run: Run, batch: tuple[Tensor, Tensor], device: torch.device) -> dict[str, float]:
    """Floating-point operations of a forward and backward pass, and bytes that its operations read and write."""

    def once() -> None:
        with autocast(run.recipe.precision, device):
            loss = run.task.loss(run.net(batch[0]), batch[1])
        loss.backward()
        run.optimizer.zero_grad()

    run.optimizer.zero_grad()
    with FlopCounterMode(display=False) as counter:
        once()
    with Traffic() as traffic:
        once()
    return {"flops_of_a_pass": float(counter.get_total_flops()), "bytes_of_a_pass": float(traffic.bytes)}


# The documentation's page

SHOWN = {  # a few bars from many kinds of kernels; those not named here are elementwise
    "convolutions": "convolutions",
    "matrix products": "matrix products and attention",
    "attention": "matrix products and attention",
    "all weights at once": "optimizer and perturbation",
    "copies": "copies and layout",
    "changes of memory layout": "copies and layout",
}
ELEMENTWISE = "normalisation, elementwise, sums"


def shown(r: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step by what is done."""
    bars = dict.fromkeys((*SHOWN.values(), ELEMENTWISE), 0.0)
    for kind, k in r["kinds"].items():
        bars[SHOWN.get(kind, ELEMENTWISE)] += k["us"] / 1e3
    bars["gaps"] = max(r["milliseconds"]["median"] - r["busy_us"] / 1e3, 0.0)
    return {who: ms for who, ms in bars.items() if ms > 0}


def charts(record: Record, name: str) -> Iterator[Chart]:
    """Shares of a step's time by kind of kernel, what limits it, and the parts of an epoch."""
    steps, limits, epochs = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for r in record["models"]:
        total = r["milliseconds"]["median"]
        label = f"{r['model']}, {r['precision']}: {total:.3g} ms, {r['kernels']:.0f} kernels"
        steps[label] = {kind: milliseconds / total for kind, milliseconds in shown(r).items()}
        limits[f"{r['model']}, {r['precision']}"] = {
            "multiplications at the full rate": r["multiplications_ms"] / total,
            "memory at the full rate": r["memory_ms"] / total,
        }
        label = f"{r['model']}, {r['epoch']['examples'] / r['epoch']['seconds']:.0f} examples per second"
        epochs[label] = r["epoch"]["parts"]
    where = device_of(record)
    yield Chart(f"{name}-step", f"A captured SAM step, by what is done, {where}", "share of the step's time", steps)
    title = f"Two passes at the limits of the chip, {where}"
    yield Chart(f"{name}-limits", title, "share of the step's time", limits, "the step")
    yield Chart(f"{name}-epoch", f"An epoch of SAM, {where}", "seconds", epochs)


PAGE = Page(
    "Where the time goes",
    "A step and an epoch of the lab's own training loop with SAM: captured; ResNet-18, ViT and GPT in bf16 and "
    "compiled, the small nets in TF32. A kernel counts by its name. The limits are those of two passes: their "
    "multiplications at the rate of large matrices, and the tensors of all operations, read and written once each.",
    charts,
    place=3,
)


def show(found: dict[str, Any]) -> None:
    total = found["milliseconds"]["median"]
    rows = [[kind, f"{k['us'] / 1e3:.3f}", f"{k['kernels']:.0f}"] for kind, k in found.get("kinds", {}).items()]
    if rows:
        rows.append(["gaps", f"{total - found['busy_us'] / 1e3:.3f}", ""])
        rows.append(["(two passes' multiplications)", f"{found['multiplications_ms']:.3f}", ""])
        rows.append(["(two passes' memory)", f"{found['memory_ms']:.3f}", ""])
    rows.append(["plain step", f"{found['plain_milliseconds']['median']:.3f}", ""])
    rows += [[f"epoch: {part}", f"{1e3 * s:.1f}", ""] for part, s in found["epoch"]["parts"].items()]
    show_table(f"{found['model']}, SAM {total:.3f} ms", ["kind", "ms", "kernels"], rows)
    for k in found.get("longest", []):
        print(f"{k['us'] / 1e3 / total:6.1%}  {k['us']:8.1f} us  {k['kernels']:5.0f} x  {k['name']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--examples", type=int, default=50_000, help="images in an epoch")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    device = pick_device(args.device)
    torch.set_float32_matmul_precision("high")
    rates: dict[str, float] = {}
    if device.type == "cuda":
        rates = {name: matmul_rate(device, DTYPES[name]) for name in ("tf32", "bf16")} | {"bytes": copy_rate(device)}
    path = args.results / f"where_time_goes-{device.type}.json"
    models: list[dict[str, Any]] = []
    for name in args.models:
        began = time.perf_counter()
        models.append(one_model(name, device, args.examples, rates))
        show(models[-1])
        print(f"{time.perf_counter() - began:.0f} s for {name}", flush=True)
        # After every model, so that an error or a time limit loses only the one under way.
        write_json(path, {"environment": environment(device), "rates": rates, "models": models})
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
