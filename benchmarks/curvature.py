"""Top eigenvalue and trace of trained nets: time and products to a *true* error, beside PyHessian and curvlinops.

    python benchmarks/curvature.py                  # CPU, digits; writes results/curvature-cpu.json
    python benchmarks/curvature.py --device cuda    # writes results/curvature-cuda.json
    python benchmarks/curvature.py --data-dir DIR   # MNIST's four idx files instead of digits

Every contender has several settings, from loose to strict. Each setting is run with several seeds, and its error is
measured against a float64 reference. The result is the cheapest setting whose error meets the target: on every seed for
the top eigenvalue, in the root mean square for the trace. Building the operator is part of the time.

    python benchmarks/curvature.py --ways           # only milliseconds per product, by way and block size

Products with a block of vectors can be computed in several ways; which is fastest depends on the device. The default
follows this table.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from charts import Chart, Page, Record, count, device_of
from common import RESULTS, environment, pick_device, show_table, timed, write_json
from curvature_contenders import TOP, TRACE, Case, Data
from torch import Tensor, nn

from steppe.curvature import Hessian, eigenvalues, trace

TOP_TARGET, TRACE_TARGET = 1e-3, 1e-2


# Nets and data


def mlp3(inputs: int) -> nn.Module:
    """Three weight layers of width 256, batch norm before each, softplus between."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in ((inputs, 256), (256, 256)):
        layers += [nn.BatchNorm1d(fan_in), nn.Linear(fan_in, fan_out), nn.Softplus()]
    return nn.Sequential(*layers, nn.BatchNorm1d(256), nn.Linear(256, 10))


def cnn5() -> nn.Module:
    """Four convolutions and a linear layer, batch norm before each, softplus between."""
    layers: list[nn.Module] = []
    for fan_in, fan_out, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 2), (32, 64, 2)):
        layers += [nn.BatchNorm2d(fan_in), nn.Conv2d(fan_in, fan_out, 3, stride, padding=1), nn.Softplus()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))


def load(folder: Path | None) -> tuple[str, Data]:
    if folder is not None:
        images, labels = (_idx(folder, f"train-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        return "mnist", (images[:4096].float().div(255).unsqueeze(1), labels[:4096].long())
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return "digits", (torch.tensor(pixels).float().div(16).reshape(-1, 1, 8, 8), torch.tensor(labels))


def _idx(folder: Path, name: str) -> Tensor:
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        sys.exit(f"no {name} or {name}.gz in {folder}")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    sizes = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=4 + 4 * raw[3]).reshape(sizes)


def trained(model: nn.Module, data: Data, device: torch.device, epochs: int = 15) -> nn.Module:
    model = model.to(device).train()
    x, y = (t.to(device) for t in data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    model.zero_grad()
    return model.eval()


# Ways to multiply a block of vectors: the operator's options

WAYS: dict[str, dict[str, Any]] = {
    "graph, one by one": {"way": "graph", "chunk": 1},
    "graph, vmapped": {"way": "graph", "chunk": 256},
    "fresh graph, vmapped": {"way": "fresh", "chunk": 256},
    "forward, vmapped": {"way": "forward", "chunk": 256},
    "auto": {},
}
BLOCKS = (1, 4, 16, 64, 128)


def measure_ways(case: Case, seconds: float) -> dict[str, dict[str, float | None]]:
    """Milliseconds per product, the best of a few repeats; None where a way fails or is far too slow."""
    device, size = case.data[0].device, sum(p.numel() for p in case.model.parameters())
    vectors = torch.randn(size, max(BLOCKS), generator=torch.Generator().manual_seed(0)).to(device)
    expected = Hessian(case.model, F.cross_entropy, case.data, way="graph", chunk=1) @ vectors[:, :1]
    found: dict[str, dict[str, float | None]] = {}
    for name, options in WAYS.items():
        operator = Hessian(case.model, F.cross_entropy, case.data, **options)
        found[name] = dict.fromkeys(map(str, BLOCKS))
        for block in BLOCKS:
            part = vectors[:, :block].contiguous()
            try:
                product = operator @ part  # warm up
                error = float((product[:, :1] - expected).norm() / expected.norm())
                if error > 1e-4:
                    raise RuntimeError(f"differs by {error:.1e} from double backward")
                begun, best = time.perf_counter(), math.inf
                for _ in range(5):
                    best = min(best, timed(lambda p=part, o=operator: o @ p, 1, device))
                    if time.perf_counter() - begun > seconds:
                        break
            except Exception as error:  # a way that does not work with a net is a result too
                print(f"  {name}, {block}: {type(error).__name__}: {error}"[:200], flush=True)
                break
            found[name][str(block)] = 1e3 * best / block
            print(f"  {name}, {block} vectors: {1e3 * best / block:.3f} ms each ({operator.how})", flush=True)
            if best > seconds:  # larger blocks would take longer still
                break
    return found


def show_ways(net: str, found: dict[str, dict[str, float | None]]) -> None:
    rows = [[name, *(f"{v:.3f}" if v else "" for v in times.values())] for name, times in found.items()]
    show_table(f"{net}: ms per product", ["way", *map(str, BLOCKS)], rows)


# Measuring


@dataclass
class Outcome:
    """What one setting of one contender did, seed by seed."""

    setting: str
    errors: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    products: list[int] = field(default_factory=list)

    def error(self, kind: str) -> float:
        """The worst of all seeds for an eigenvalue, the root mean square for a trace."""
        return max(self.errors) if kind == "top" else math.sqrt(statistics.fmean(e * e for e in self.errors))

    def summary(self, kind: str) -> dict[str, Any]:
        """The outcome as an entry of the JSON file."""
        name = "max_error" if kind == "top" else "rms_error"
        medians = {"seconds": statistics.median(self.seconds), "products": statistics.median(self.products)}
        return {"setting": self.setting, name: self.error(kind), "seeds": len(self.errors), **medians}


def measure(case: Case, contenders: dict[str, Any], kind: str, seeds: int, limit: float) -> dict[str, Any]:
    """Every setting of every contender, until one meets the target or takes longer than the limit."""
    target, truth = (TOP_TARGET, case.largest) if kind == "top" else (TRACE_TARGET, case.trace)
    device = case.data[0].device
    found: dict[str, Any] = {}
    for name, contender in contenders.items():
        outcomes: list[Outcome] = []
        try:
            for setting, run in contender(case):
                outcome = Outcome(setting)
                outcomes.append(outcome)
                if len(outcomes) == 1:
                    run(999)  # warm up
                for seed in range(seeds):
                    _settle(device)
                    begun = time.perf_counter()
                    value, products = run(seed)
                    _settle(device)
                    outcome.seconds.append(time.perf_counter() - begun)
                    outcome.errors.append(abs(value - truth) / abs(truth))
                    outcome.products.append(products)
                    if outcome.seconds[-1] > limit:
                        break
                print(f"  {kind}, {name}, {setting}: {statistics.median(outcome.seconds):.3f} s", flush=True)
                if name != "steppe" and (outcome.error(kind) <= target or outcome.seconds[-1] > limit):
                    break
        except ImportError as error:
            found[name] = {"missing": str(error)}
            continue
        except Exception as error:  # a failure of another library is a result too
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            continue
        good = [o for o in outcomes if o.error(kind) <= target]
        best = min(good, key=lambda o: statistics.median(o.seconds)) if good else None
        found[name] = {
            "settings": [o.summary(kind) for o in outcomes],
            "to_target": best.summary(kind) if best else None,
        }
    return found


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reference(model: nn.Module, data: Data) -> dict[str, Any]:
    """The top eigenvalue to 1e-6 in float64, and the trace to a standard error a third of its target."""
    double = copy.deepcopy(model).double()
    top = eigenvalues(Hessian(double, F.cross_entropy, data), rtol=1e-6, progress=True)
    operator = Hessian(model, F.cross_entropy, data)
    whole = trace(operator, rtol=TRACE_TARGET / 3, max_matvecs=50_000, seed=12345, progress=True)
    return {
        "top": float(top.values[0]), "top_residual": float(top.residuals[0]), "trace": whole.value,
        "trace_error": whole.standard_error, "converged": bool(top.converged[0]) and whole.converged,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--samples", type=int, default=256, help="samples measured on, in one batch")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds after which stricter settings are not tried")
    parser.add_argument("--nets", nargs="+", default=["MLP-3", "CNN-5"])
    parser.add_argument("--ways", action="store_true", help="only compare ways to multiply a block of vectors")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    name, (x, y) = load(arguments.data_dir)
    path = arguments.out or RESULTS / f"curvature-{device.type}.json"
    content: dict[str, Any] = {"environment": _environment(device), "data": name, "samples": arguments.samples}
    content |= {"seeds": arguments.seeds, "targets": {"top_max": TOP_TARGET, "trace_rms": TRACE_TARGET}, "nets": {}}
    if arguments.ways and path.exists():
        content = json.loads(path.read_text()) | {"ways_environment": _environment(device)}
    begun = time.monotonic()
    for net in arguments.nets:
        torch.manual_seed(0)
        model = trained(mlp3(x[0].numel()) if net == "MLP-3" else cnn5(), (x, y), device)
        data = x[: arguments.samples].to(device), y[: arguments.samples].to(device)
        weights = sum(p.numel() for p in model.parameters())
        result = content["nets"].setdefault(net, {"weights": weights})
        print(f"[{time.monotonic() - begun:.0f} s] {net}: {weights:,} weights", flush=True)
        result["ways_ms_per_product"] = measure_ways(Case(model, data), seconds=2.0)
        show_ways(net, result["ways_ms_per_product"])
        write_json(path, content)
        if arguments.ways:
            continue
        truth = result["reference"] = reference(model, data)
        case = Case(model, data, truth["top"], truth["trace"])
        print(f"[{time.monotonic() - begun:.0f} s] λ₁ = {truth['top']:.6g}, trace = {truth['trace']:.5g}", flush=True)
        for kind, contenders in (("top", TOP), ("trace", TRACE)):
            found = measure(case, contenders, kind, arguments.seeds, arguments.limit)
            result[kind] = found | {"ratios": ratios(found)}
            _show(net, kind, found)
            print(
                f"[{time.monotonic() - begun:.0f} s] a peer's time over steppe's: {result[kind]['ratios']}", flush=True
            )
            write_json(path, content)


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Time of each other library relative to steppe's; a lower bound if none of its settings met the target in time."""
    ours = found.get("steppe", {}).get("to_target")
    if not ours:
        return {}
    times = {}
    for name, one in found.items():
        if name != "steppe" and one.get("settings"):
            theirs = one["to_target"] or one["settings"][-1]
            times[name if one["to_target"] else f"{name} (target not met)"] = theirs["seconds"] / ours["seconds"]
    return times


def _environment(device: torch.device) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    peers: dict[str, str | None] = {}
    for package in ("pyhessian", "curvlinops-for-pytorch", "scipy"):
        try:
            peers[package] = version(package)
        except PackageNotFoundError:
            peers[package] = None
    return environment(device) | {"clock": "perf_counter"} | peers


def _show(net: str, kind: str, found: dict[str, Any]) -> None:
    error = "max_error" if kind == "top" else "rms_error"
    rows = []
    for name, one in found.items():
        if "settings" not in one:
            rows.append([name, one.get("missing") or one["failed"], "", "", "", ""])
        for each in one.get("settings", []):
            chosen = "*" if each == one["to_target"] else ""
            numbers = [f"{each[error]:.1e}", f"{each['products']:.0f}", f"{each['seconds'] * 1e3:.1f} ms", chosen]
            rows.append([name, each["setting"], *numbers])
    show_table(f"{net}, {kind}", ["", "setting", "true error", "products", "time", "target"], rows)


# The documentation's page


def charts(record: Record, name: str) -> Iterator[Chart]:
    """Seconds until an estimate is as accurate as requested."""
    for measure, title in {"top": "Largest eigenvalue to 0.1 %", "trace": "Trace to 1 %"}.items():
        bars: dict[str, dict[str, float]] = {}
        for net, results in record["nets"].items():
            reached = {who: r.get("to_target") for who, r in results[measure].items() if who != "ratios"}
            label = f"{net}, {count(results['weights'])}"
            bars[label] = {who: end["seconds"] for who, end in reached.items() if end}
        yield Chart(f"{name}-{measure}", f"{title}, {device_of(record)}", "seconds", bars, logarithmic=True)


PAGE = Page(
    "Curvature",
    "Seconds until an estimate is within its target of the true value, with the fastest setting of each library that "
    "reaches the target. A bar is missing where none does.",
    charts,
    place=8,
)


if __name__ == "__main__":
    main()
