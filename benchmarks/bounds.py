"""The cost of a method's step relative to its lower bound, and how it grows with the size of the problem.

    python benchmarks/bounds.py [--device cuda] [--models mlp-3 cnn-5 ...] [--largest 30] [--results FOLDER]

A step with k looks takes at least k gradients: k times the time of the base's step. Measured for each model and method,
captured (Adam, random images, TF32), in alternation in one run:

gradients: the time of the step in units of the base's step, divided by the number of looks of the method;
bytes: what steppe reads and writes besides the gradients and the base's step, in copies of the weights. At least it has
    to read the gradient for its norm, to copy the weights, to read weights and gradient and write the perturbed
    weights, and to restore the weights from the copy;
launches: kernels beyond those of the base's step. A whole captured step is one launch by the host.

Growth: SAM relative to the base by the number of parameters (stacks of linear layers, 1 million to 1 billion, batch
128), and by the batch size (CNN-5).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from captured import Traffic
from charts import Chart, Page, Record, count, device_of
from common import RESULTS, Spread, Step, environment, interleaved, pick_device, ratios, show_table, write_json
from kernels import kernels
from torch import Tensor, nn

import steppe
from steppe.lab.models import build
from steppe.method import Method

METHODS: dict[str, Method] = {
    "SAM": steppe.SAM(),
    "ASAM": steppe.ASAM(),
    "GSAM": steppe.GSAM(),
    "WSAM": steppe.WSAM(),
    "FSAM": steppe.FSAM(),
    "GNP": steppe.GNP(),
    "SAMPa": steppe.SAMPa(),
    "MSAM": steppe.MSAM(),
    "ARWP": steppe.ARWP(),
    "MARWP": steppe.MARWP(),
    "TraceSAM, n = 4": steppe.TraceSAM(n=4),
    "GAM": steppe.GAM(),
}


def step_of(model: nn.Module, method: Method, batch: Any, other: Any) -> tuple[Step, steppe.SharpnessAware]:
    """A captured step; on a CPU, an eager one."""
    fused = next(model.parameters()).is_cuda
    opt = steppe.SharpnessAware(torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused), method, model=model)
    second: dict[str, Any] = {"auxiliary": other} if "auxiliary" in method.needs else {}
    step = steppe.capture(lambda x, y: F.cross_entropy(model(x), y), opt)
    for _ in range(6):  # eager steps to warm up, also those of a method whose first step differs; then recorded ones
        step(*batch, **second)
    if fused and not step.how.startswith("replayed"):
        raise SystemExit(step.how)
    return lambda: step(*batch, **second), opt


def bytes_beside(model: nn.Module, method: Method) -> float:
    """Bytes that steppe reads and writes besides passes and base step, in copies of the weights.

    The passes only assign given gradients, so they do not count.
    """
    params = list(model.parameters())
    grads = [torch.randn_like(p) for p in params]
    loss = torch.zeros((), device=params[0].device)

    def closure() -> Tensor:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        return loss.detach()

    opt = steppe.SharpnessAware(torch.optim.SGD(params, lr=0.0, fused=params[0].is_cuda), method, model=model)
    more: dict[str, Any] = {"auxiliary": lambda: closure()} if "auxiliary" in method.needs else {}
    seen = []
    for run in (lambda: opt.step(closure, **more), lambda: (closure(), opt.base.step())):
        run()
        with Traffic() as traffic:
            run()
        seen.append(traffic.bytes)
    return (seen[0] - seen[1]) / sum(p.numel() * p.element_size() for p in params)


def by_method(name: str, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Each method on one model."""
    size = 128 if name == "resnet-18" else 100
    batch, other = (
        (torch.rand(size, 3, 32, 32, device=device), torch.randint(10, (size,), device=device)) for _ in range(2)
    )

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = build(name, (3, 32, 32), 10).to(device)
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return model

    made_steps = {who: step_of(made(), method, batch, other) for who, method in METHODS.items()}
    steps = {who: step for who, (step, _) in made_steps.items()}
    steps["base"] = step_of(made(), steppe.Plain(), batch, other)[0]
    times = interleaved(steps, device, rounds, 0.0)
    counted = {who: kernels(step, 5)["kernels"] for who, step in steps.items()} if device.type == "cuda" else {}
    rows: list[dict[str, Any]] = []
    for who, (_, opt) in made_steps.items():
        looks = float(opt.metrics["looks"])
        row: dict[str, Any] = {"model": name, "method": who, "looks": looks}
        row["milliseconds"] = asdict(Spread.of(times[who], 1e3))
        row["gradients"] = asdict(Spread.of(ratios(times[who], times["base"])))
        row["over_bound"] = row["gradients"]["median"] / looks
        row["bytes"] = bytes_beside(made(), METHODS[who])
        if counted:
            row["kernels"] = counted[who] - counted["base"]
        rows.append(row)
    return rows


def growth(device: torch.device, largest: float, rounds: int) -> list[dict[str, Any]]:
    """SAM over the base by parameters and by batch."""
    rows: list[dict[str, Any]] = []

    def measured(kind: str, size: int, make: Callable[[], nn.Module], batch: Any) -> None:
        steps = {
            who: step_of(make(), m, batch, batch)[0] for who, m in (("base", steppe.Plain()), ("SAM", steppe.SAM()))
        }
        times = interleaved(steps, device, rounds, 0.0)
        over = Spread.of(ratios(times["SAM"], times["base"]))
        ms = {who: Spread.of(t, 1e3).median for who, t in times.items()}
        rows.append({"by": kind, "size": size, "over_base": asdict(over), **ms})

    for width in (512, 1024, 2048, 4096, 8192, 16384):
        if 4 * width**2 <= largest:
            x, y = torch.rand(128, width, device=device), torch.randint(10, (128,), device=device)

            def stack(width: int = width) -> nn.Module:
                layers = [part for _ in range(4) for part in (nn.Linear(width, width, device=device), nn.ReLU())]
                return nn.Sequential(*layers)

            measured("parameters", 4 * width**2, stack, (x, y))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for size in (16, 64, 256, 1024, 4096) if largest > 1e6 else (16,):
        batch = torch.rand(size, 3, 32, 32, device=device), torch.randint(10, (size,), device=device)
        measured("batch", size, lambda: build("cnn-5", (3, 32, 32), 10).to(device), batch)
    return rows


# The documentation's page


def charts(record: Record, name: str) -> Iterator[Chart]:
    """Time over the bound, traffic and kernels of each method, and growth."""
    where = device_of(record)
    over, moved = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for r in record["methods"]:
        looks = "1 look" if r["looks"] == 1 else f"{r['looks']:.3g} looks"
        over.setdefault(f"{r['method']}, {looks}", {})[r["model"]] = r["over_bound"]
        if r["model"] == record["methods"][0]["model"]:
            moved[r["method"]] = {"reads and writes": r["bytes"]}
    yield Chart(f"{name}-gradients", f"Time of a captured step, {where}", "over its gradients", over, "as many bases")
    yield Chart(f"{name}-bytes", "Beside the gradients and the base", "reads and writes of all weights", moved)
    for kind, size_text in (("parameters", count), ("batch", str)):
        bars = {
            size_text(r["size"]): {"SAM / base": r["over_base"]["median"]} for r in record["growth"] if r["by"] == kind
        }
        yield Chart(f"{name}-{kind}", f"SAM over its base by {kind}, {where}", "SAM / base", bars, "the base")


def table(record: Record) -> list[str]:
    """All of it for each model and method."""
    lines = ["| model | method | looks | time, in steps of the base | over the bound | bytes | kernels |"]
    lines.append("|---|---|---|---|---|---|---|")
    for r in record["methods"]:
        cells = [r["model"], r["method"], f"{r['looks']:.3g}", f"{r['gradients']['median']:.2f}"]
        cells += [f"{r['over_bound']:.2f}", f"{r['bytes']:.1f}", f"{r.get('kernels', 0):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


PAGE = Page(
    "Relative to the lower bound",
    "A step with k looks takes at least k gradients, so as long as k steps of the base. Shown are how close captured "
    "methods come to that; what they read and write besides the gradients, in copies of the weights (at least 8 for "
    "SAM: norm 1, copy 2, move 3, restore 2); the kernels beyond those of the base's step; and how SAM's cost grows "
    "with the model and the batch.",
    charts,
    place=6,
    text=table,
)


def show(content: dict[str, Any]) -> None:
    rows = [
        [r["model"], r["method"], f"{r['looks']:.3g}", f"{r['milliseconds']['median']:.3f}",
         f"{r['gradients']['median']:.2f}", f"{r['over_bound']:.3f}", f"{r['bytes']:.1f}", f"{r.get('kernels', 0):.0f}"]
        for r in content["methods"]
    ]  # fmt: skip
    show_table("bounds", ["model", "method", "looks", "ms", "bases", "over bound", "bytes", "kernels"], rows)
    rows = [
        [r["by"], f"{r['size']}", f"{r['base']:.3f}", f"{r['SAM']:.3f}", f"{r['over_base']['median']:.3f}"]
        for r in content["growth"]
    ]
    show_table("growth", ["by", "size", "base, ms", "SAM, ms", "SAM / base"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp-3", "cnn-5", "cnn-14", "resnet-18"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--largest", type=float, default=1.1e9, help="parameters of the largest stack")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    device = pick_device(args.device)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    content: dict[str, Any] = {"environment": environment(device), "methods": [], "growth": []}
    path = args.results / f"bounds-{device.type}.json"
    for name in args.models:
        began = time.perf_counter()
        content["methods"] += by_method(name, device, args.rounds)
        write_json(path, content)  # now, so that an error or a time limit loses only the model under way
        print(f"{time.perf_counter() - began:.0f} s for {name}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    content["growth"] = growth(device, args.largest, args.rounds)
    write_json(path, content)
    show(content)


if __name__ == "__main__":
    main()
