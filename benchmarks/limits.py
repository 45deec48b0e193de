"""Two possible savings in a step on a GPU: batched passes and lower precision.

    python benchmarks/limits.py [--results FOLDER]

Contenders are measured in alternation in one run, medians:

one pass: GAM needs the gradients of two batches at one point: in two passes, or both in one batched pass.
precision: the time of captured steps in float32, TF32, bfloat16 and float16 (with a fixed loss scale), several seeds at
    once; and the error of GAM, whose directions and slopes are differences of gradients, against float64, on a net
    trained on digits.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from charts import Chart, Page, Record, device_of
from common import RESULTS, Spread, Step, environment, interleaved, pick_device, show_table, write_json
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import steppe
from steppe.lab.models import build

SEEDS, BATCH = 5, 100
PRECISIONS = ("float32", "TF32", "bfloat16", "float16")
AUTOCAST = ("bfloat16", "float16")
MODELS = ("mlp-3", "cnn-5", "cnn-14")


def set_tf32(on: bool) -> None:
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def under(precision: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", getattr(torch, precision)) if precision in AUTOCAST else contextlib.nullcontext()


# Two gradients at one point


def one_pass(device: torch.device) -> list[dict[str, Any]]:
    """Gradients of two batches at the same weights, captured: one after the other, and in one batched pass."""
    set_tf32(True)
    rows = []
    for name in MODELS:
        model = build(name, (3, 32, 32), 10).to(device)
        for layer in model.modules():
            if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):  # running statistics cannot be batched over
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        params = {name: p.detach() for name, p in model.named_parameters()}
        images = torch.rand(2, BATCH, 3, 32, 32, device=device)
        labels = torch.randint(10, (2, BATCH), device=device)

        def loss(params: Any, x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return F.cross_entropy(functional_call(model, params, (x,)), y)

        single, batched = grad(loss), vmap(grad(loss), in_dims=(None, 0, 0))

        def apart(single=single, params=params, images=images, labels=labels) -> Any:
            return [single(params, x, y) for x, y in zip(images, labels, strict=True)]

        def joined(batched=batched, params=params, images=images, labels=labels) -> Any:
            return batched(params, images, labels)

        times = interleaved({"apart": _recorded(apart), "joined": _recorded(joined)}, device, 20, 2.0)
        rows.append({"model": name, **{who: asdict(Spread.of(t, 1e3)) for who, t in times.items()}})
    return rows


def _recorded(function: Step) -> Step:
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


# Precision


def precision(device: torch.device) -> list[dict[str, Any]]:
    """Time of a SAM step a seed, and the error of GAM's direction and slope against float64."""
    rows = []
    for name in MODELS:
        errors = _errors(name, device)
        for kind in PRECISIONS:
            set_tf32(kind == "TF32")
            step = _at_once(name, kind, device)
            spread = Spread.of(interleaved({kind: step}, device, 10, 2.0)[kind], 1e3 / SEEDS)
            rows.append({"model": name, "precision": kind, "sam_ms_a_seed": asdict(spread), **errors[kind]})
    return rows


def _at_once(name: str, kind: str, device: torch.device) -> Step:
    """One captured SAM step of each of several nets, on streams of their own."""
    streams, steps = [torch.cuda.Stream() for _ in range(SEEDS)], []
    x, y = torch.rand(BATCH, 3, 32, 32, device=device), torch.randint(10, (BATCH,), device=device)
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model: Any = build(name, (3, 32, 32), 10).to(device)
            model.to(memory_format=torch.channels_last)
            opt = steppe.SharpnessAware(torch.optim.Adam(model.parameters()), steppe.SAM(), model=model)

            def loss(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
                with under(kind):
                    return F.cross_entropy(model(x), y)

            steps.append(steppe.capture(loss, opt, scaler=steppe.FixedScale() if kind == "float16" else None))
            for _ in range(4):
                steps[-1](x, y)
    torch.cuda.synchronize()

    def all_of_them() -> None:
        for stream, step in zip(streams, steps, strict=True):
            with torch.cuda.stream(stream):
                step(x, y)

    return all_of_them


def _errors(name: str, device: torch.device) -> dict[str, dict[str, float]]:
    """Relative errors of GAM's direction and slope: one step from the same place in each precision."""
    set_tf32(False)
    images, labels = load_digits(return_X_y=True)
    x = F.interpolate(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, 32).expand(-1, 3, -1, -1)
    x, y = x.to(device), torch.tensor(labels, device=device)
    torch.manual_seed(0)
    model = build(name, (3, 32, 32), 10).to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)  # it has no state that would have to be converted to float64
    opt = steppe.SharpnessAware(sgd, steppe.GAM(), model=model)

    def closures(model: nn.Module, step: int, kind: str) -> dict[str, Any]:
        def on(start: int) -> Tensor:
            part = slice(start * BATCH % 1700, start * BATCH % 1700 + BATCH)
            with under(kind):
                return F.cross_entropy(model(x[part].to(next(model.parameters()).dtype)), y[part])

        return {"closure": lambda: on(step), "auxiliary": lambda: on(step - 1)}

    for step in range(1, 100):
        opt.step(**closures(model, step, "float32"))
    found = {}
    for kind in ("float64", *PRECISIONS):
        set_tf32(kind == "TF32")
        twin, its = copy.deepcopy((model, opt))
        if kind == "float64":
            twin.double()
        scaler = steppe.FixedScale() if kind == "float16" else None
        its.gradient(**closures(twin, 100, kind), scaler=scaler)
        if scaler is not None:
            scaler.unscale_(its)
        direction = torch.cat([p.grad.double().flatten() for p in twin.parameters() if p.grad is not None])
        its.step()
        found[kind] = direction, its.metrics["slope"].double()
    true = found.pop("float64")
    names = ("direction_error", "slope_error")
    return {
        kind: {n: float((a - b).norm() / b.norm()) for n, a, b in zip(names, pair, true, strict=True)}
        for kind, pair in found.items()
    }


# The documentation's page


def charts(record: Record, name: str) -> Iterator[Chart]:
    """Charts of one batched pass against two, and of the time and the error of each precision."""
    passes = {
        r["model"]: {"one after the other": r["apart"]["median"], "one batched pass": r["joined"]["median"]}
        for r in record["one_pass"]
    }
    where = device_of(record)
    yield Chart(f"{name}-pass", f"Two gradients at one point, captured, {where}", "milliseconds", passes)
    times: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    for r in record["precision"]:
        times.setdefault(r["model"], {})[r["precision"]] = r["sam_ms_a_seed"]["median"]
        errors.setdefault(f"{r['model']}, direction", {})[r["precision"]] = r["direction_error"]
        errors.setdefault(f"{r['model']}, slope of γ", {})[r["precision"]] = r["slope_error"]
    yield Chart(f"{name}-precision", f"SAM, captured, five seeds at once, {where}", "milliseconds per seed", times)
    title = "GAM's direction and slope, error against float64"
    yield Chart(f"{name}-errors", title, "relative error", errors, logarithmic=True)


PAGE = Page(
    "Batched passes and precision",
    "Whether two gradients are cheaper in one pass, and what lower precision costs GAM, whose directions and slopes "
    "are differences of gradients. GAM's two gradients at one point stay two passes: one batched pass saves a "
    "twentieth on small nets, takes half as long again on CNN-14, and cannot keep BatchNorm's statistics. No look is "
    "reused in the next step either: weights and batch are new, so that would be another method (such as LookSAM).",
    charts,
    place=5,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    device = pick_device("cuda")
    found = {"one_pass": one_pass(device), "precision": precision(device)}
    rows = [[r["model"], f"{r['apart']['median']:.3f}", f"{r['joined']['median']:.3f}"] for r in found["one_pass"]]
    show_table("two gradients at one point, ms", ["model", "one after the other", "one pass"], rows)
    rows = [
        [r["model"], r["precision"], f"{r['sam_ms_a_seed']['median']:.3f}", f"{r['direction_error']:.1e}",
         f"{r['slope_error']:.1e}"]
        for r in found["precision"]
    ]  # fmt: skip
    columns = ["model", "precision", "SAM, ms per seed", "error of GAM's direction", "of its slope"]
    show_table("precision", columns, rows)
    write_json(args.results / "limits-cuda.json", {"environment": environment(device), **found})


if __name__ == "__main__":
    main()
