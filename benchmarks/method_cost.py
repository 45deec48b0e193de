"""The cost of every method: time of a step relative to its bare looks, and copies of the model at the memory peak.

    python benchmarks/method_cost.py [--device cpu|cuda] [--model resnet18] [--batch N] [--rounds N]

A bare look is one forward and backward pass. Each method is measured in alternation with as many bare looks as it
declares and the base's step. Its peak memory over the base's, in parameter bytes, is given beside the copies it
declares. GAM is also measured on the steps between two updates of its coefficients. Data are random tensors.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from charts import Chart, Page, Record, device_of
from common import CASES, RESULTS, Case, Step, environment, interleaved, pick_device, ratios, show_table, write_json
from contenders import Contender, bare
from peak_memory import peak_bytes
from torch import Tensor, nn

import steppe
from steppe.methods.registry import own_methods as known_methods
from steppe.methods.registry import with_defaults


def contender(method: steppe.Method) -> Contender:
    """A step of a method, on random batches."""

    def build(model: nn.Module, loss: Step) -> Step:
        momentum = 0.0 if "lr" in method.needs else 0.9
        base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum, weight_decay=5e-4)
        opt = steppe.SharpnessAware(base, method, model)
        return lambda: opt.step(loss, auxiliary=loss, sample=lambda i: loss())

    return build


def methods() -> dict[str, steppe.Method]:
    """Every method with its default settings whose steps all cost the same: no Every, no LookSAM, no mask updates."""
    chosen = {cls.__name__: with_defaults(cls) for cls in known_methods()}
    for name in ("Every", "LookSAM", "Plain"):
        del chosen[name]
    chosen["SSAM"] = steppe.SSAM(rule="dynamic")
    chosen["GAM, between updates"] = steppe.GAM(period=10**9)
    return chosen


def looks_of(name: str, method: steppe.Method) -> float:
    return method.T + 1 if name == "GAM, between updates" and isinstance(method, steppe.GAM) else method.cost


def time_one(name: str, method: steppe.Method, case: Case, device: torch.device, args: argparse.Namespace) -> float:
    """Time of a step over the time of as many bare looks and the base's step."""
    torch.manual_seed(0)
    start = case.build().to(device)
    x, y = case.batch_on(device)

    def built(build: Contender) -> Step:
        model = copy.deepcopy(start)

        def loss() -> Tensor:
            return F.cross_entropy(model(x), y)

        return build(model, loss)

    steps = {"bare": built(bare(round(looks_of(name, method)))), "method": built(contender(method))}
    samples = interleaved(steps, device, args.rounds, args.seconds)
    return statistics.median(ratios(samples["method"], samples["bare"]))


# The documentation's page


def charts(record: Record, name: str) -> Iterator[Chart]:
    """Time of each method's step over as many bare passes as it has looks."""
    bars = {f"{r['method']}, {r['looks']:.3g} looks": {"steppe": r["over_bare"]} for r in record["records"]}
    title = f"{record['model']}, batch {record['batch']}, {device_of(record)}"
    yield Chart(name, title, "time of a step", bars, "as many bare passes")


PAGE = Page(
    "Every method",
    "The median time of each method's step divided by the time of as many bare passes as it has looks. 1 is the least "
    "possible; ratios below 1 are measurement noise.",
    charts,
    place=6,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet18", choices=list(CASES))
    parser.add_argument("--batch", type=int, help="batch size (a large one keeps a GPU busy while the host works)")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=4.0, help="time for one method")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    device, case = pick_device(args.device), CASES[args.model]
    if args.batch is not None:
        case = replace(case, batch={device.type: args.batch})
    base, *_ = peak_bytes(case, contender(steppe.Plain()), device)
    records: list[dict[str, Any]] = []
    for name, method in methods().items():
        peak, _, size = peak_bytes(case, contender(method), device)
        declared = looks_of(name, method)
        copies = (peak - base) / size
        over_bare = time_one(name, method, case, device, args)
        records.append({"method": name, "looks": declared, "over_bare": over_bare, "copies": method.copies,
                        "measured_copies": copies})  # fmt: skip
    rows = [
        (r["method"], f"{r['looks']:g}", f"{r['over_bare']:.3f}", str(r["copies"]), f"{r['measured_copies']:.2f}")
        for r in records
    ]
    columns = ("method", "looks", "time over bare looks", "copies", "measured")
    show_table(f"{args.model}, batch {case.batch[device.type]}", columns, rows)
    path = args.results / f"method_cost-{args.model}-{device.type}.json"
    batch = case.batch[device.type]
    write_json(path, {"environment": environment(device), "model": args.model, "batch": batch, "records": records})


if __name__ == "__main__":
    main()
