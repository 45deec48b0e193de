"""Host time of an eager SAM step on a GPU, and how much of it steppe takes.

    python benchmarks/host.py [--results FOLDER]

An eager step of ResNet-18 (batch 128) takes as long as the host needs to launch it; the device waits. Measured in
alternation in one run, for two memory layouts and base optimizers, medians:

steps: milliseconds until Python is done with a step and until the device is done, the ratio to two bare passes and the
    base's step, and the number of kernel launches;
parts: microseconds of host time of what steppe does around the two passes. As a whole: a step whose passes only assign
    given gradients, minus the same without steppe. And by part: saving and restoring buffers, modes and random states;
    copying the weights and restoring them; the gradient's norm; the perturbation. One kernel launch for comparison.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from charts import Chart, Page, Record, device_of
from common import RESULTS, Spread, Step, environment, pick_device, ratios, show_table, write_json
from contenders import Base, Loss, bare, base_optimizer, fused_adam, peers, steppe_closure, steppe_passes
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import steppe
from steppe.engine.isolation import Isolation
from steppe.lab.models import build
from steppe.vector import Space, Vector

BATCH, ROUNDS = 128, 30
TARGET = 1.05  # of SAM over two bare passes


@dataclass(frozen=True)
class Layout:
    """The memory layout of the weights, and the base optimizer."""

    format: torch.memory_format
    base: Base
    peers: bool  # whether to include the peers, which have their own base

    def made(self, device: torch.device) -> tuple[nn.Module, Loss]:
        """A model and its loss on one batch."""
        torch.manual_seed(0)
        model: Any = build("resnet-18", (3, 32, 32), 10).to(device)
        model.to(memory_format=self.format)
        x = torch.rand(BATCH, 3, 32, 32, device=device).contiguous(memory_format=self.format)
        y = torch.randint(10, (BATCH,), device=device)
        return model, lambda: F.cross_entropy(model(x), y)


LAYOUTS = {  # what most scripts use, and what is fastest
    "contiguous, SGD": Layout(torch.contiguous_format, base_optimizer, peers=True),
    "channels last, fused Adam": Layout(torch.channels_last, fused_adam, peers=False),
}


def whole_steps(layout: Layout, device: torch.device) -> list[dict[str, Any]]:
    """Time until the host and until the device is done with a step, relative to two bare passes; and its launches."""
    makers = {
        "two bare passes": bare(2, layout.base),
        "steppe, closure": steppe_closure("SAM", layout.base),
        "steppe, passes": steppe_passes("SAM", layout.base),
        **(peers("SAM") if layout.peers else {}),
    }
    steps: dict[str, Step] = {}
    for name, make in makers.items():
        try:
            steps[name] = make(*layout.made(device))
        except ImportError:
            print(f"not installed, left out: {name}")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names = list(steps)
    for i in range(ROUNDS + 2):  # the first two are warm-up
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(_host_and_all(steps[name]))
    rows = []
    reference = [until for _, until in times[names[0]][2:]]
    for name, samples in times.items():
        host, until = zip(*samples[2:], strict=True)
        over = Spread.of(ratios(until, reference))
        rows.append(
            {"contender": name, "host_ms": asdict(Spread.of(host, 1e3)), "all_ms": asdict(Spread.of(until, 1e3)),
             "over_bare": asdict(over), "launches": _launches(steps[name])}
        )  # fmt: skip
    return rows


def _host_and_all(step: Step, repeats: int = 5) -> tuple[float, float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    returned = time.perf_counter()
    torch.cuda.synchronize()
    return (returned - began) / repeats, (time.perf_counter() - began) / repeats


def _launches(step: Step, repeats: int = 3) -> float:
    """The number of kernels, copies and memory sets that a step launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    starts = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")
    return sum(event.count for event in seen.key_averages() if event.key.startswith(starts)) / repeats


# Parts of what steppe does


def parts(layout: Layout, device: torch.device) -> dict[str, Any]:
    """Microseconds of the host."""
    model, loss = layout.made(device)
    base = layout.base(model)
    loss().backward()
    params: list[Tensor] = list(model.parameters())
    grads = [p.grad.clone() for p in params if p.grad is not None]
    opt = steppe.SharpnessAware(base, steppe.SAM(), model=model)

    def put() -> None:
        for p, g in zip(params, grads, strict=True):
            p.grad = g

    def with_steppe() -> None:
        for _ in opt.passes():
            put()
        opt.step()

    def without() -> None:
        for _ in range(2):
            base.zero_grad()
            put()
        base.step()

    model.zero_grad()
    space, kept = Space(params), [Isolation(model, params)]
    weights = space.live()
    home = weights.clone()
    rho = torch.tensor(1e-9, device=device)
    number = torch.zeros((), device=device)

    def isolate() -> None:
        kept[0] = kept[0].for_next_step(model, params)
        kept[0].before_extra_look()
        kept[0].after_last_look()

    def there_and_back() -> None:
        weights.clone(room=home)
        weights.copy_(home)

    alone: dict[str, Step] = {
        "a step but its passes, with steppe": with_steppe,
        "a step but its passes, without": without,
        "buffers, modes, random states": isolate,
        "a copy of the weights, and back": there_and_back,
        "the gradient's norm": lambda: Vector(grads, space).norm(),
        "the climb": lambda: weights.move_(weights, Vector(grads, space) * rho),
        "one launch": lambda: number.add_(1),
    }
    with torch.no_grad():
        times: dict[str, list[float]] = {name: [] for name in alone}
        for _ in range(ROUNDS + 2):
            for name, step in alone.items():
                times[name].append(_host_and_all(step)[0])
    spreads = {name: asdict(Spread.of(samples[2:], 1e6)) for name, samples in times.items()}
    pair = [times[name][2:] for name in list(alone)[:2]]
    own = [a - b for a, b in zip(*pair, strict=True)]
    return {"all of steppe's": asdict(Spread.of(own, 1e6)), **spreads}


# The documentation's page


def charts(record: Record, name: str) -> Iterator[Chart]:
    """Host and device time of eager steps, and what the host does in steppe's part."""
    for layout, found in record["layouts"].items():
        short = f"{name}-{layout.split(',')[0].replace(' ', '-')}"
        times: dict[str, dict[str, float]] = {}
        for r in found["steps"]:
            label = f"{r['contender']}, {r['launches']:.0f} launches"
            times[label] = {"host": r["host_ms"]["median"], "until the device is done": r["all_ms"]["median"]}
        where = f"ResNet-18, batch {record['batch']}, {layout}, {device_of(record)}"
        yield Chart(short, f"Eager SAM, {where}", "milliseconds per step", times)
        medians = {part: spread["median"] for part, spread in found["parts"].items() if not part.startswith("a step")}
        whole, launch = medians.pop("all of steppe's"), medians.pop("one launch")
        rest = whole - sum(medians.values())
        parts = {"all of steppe's": whole, **medians, "the rest, in Python": rest, "(one kernel launch)": launch}
        bars = {part: {"host": value} for part, value in parts.items()}
        yield Chart(f"{short}-parts", f"Host time of steppe's part, {where}", "microseconds per step", bars)


PAGE = Page(
    "Host time",
    "An eager step of ResNet-18 takes as long as the host needs to launch its kernels; the device waits. Around the "
    "two passes steppe launches a few kernels, copies the weights and the buffers, and sometimes loops over the "
    "parameters in Python: one to two milliseconds on a host that takes 14 to 19 microseconds for one launch. A "
    "captured step has none of this.",
    charts,
    place=3,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    device = pick_device("cuda")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        rows = whole_steps(layout, device)
        found[name] = {"steps": rows, "parts": parts(layout, device)}
        shown = [
            [r["contender"], f"{r['host_ms']['median']:.2f}", f"{r['all_ms']['median']:.2f}",
             f"{r['over_bare']['median']:.3f} ({r['over_bare']['q1']:.3f} to {r['over_bare']['q3']:.3f})",
             f"{r['launches']:.0f}"]
            for r in rows
        ]  # fmt: skip
        columns = ["step", "host, ms", "until the device is done", "over bare", "launches"]
        show_table(f"eager SAM, ResNet-18, batch {BATCH}: {name}", columns, shown)
        show_table("of the host, µs", ["part", "median"],
                   [[part, f"{spread['median']:.0f}"] for part, spread in found[name]["parts"].items()])  # fmt: skip
    content = {"environment": environment(device), "target": TARGET, "model": "resnet-18", "batch": BATCH}
    write_json(args.results / "host-cuda.json", {**content, "layouts": found})


if __name__ == "__main__":
    main()
