"""The time of a step beyond its forward and backward passes.

    python benchmarks/step_overhead.py [--device cpu|cuda] [--models resnet18 ...] [--rounds N]

For each model, SAM and GSAM by steppe (closure and passes), by pytorch-optimizer and by a plain two-step loop are
measured in alternation with *bare* passes: as many forward and backward passes and the base step, without a method.
"bare, again" is the same a second time: its distance from 1 is the resolution of the measurement. Ratios are medians
over rounds of the time divided by the time of bare in the same round; quartiles are in the JSON. Data are random
tensors.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from charts import Chart, Page, Record, count, device_of, medians
from common import CASES, RESULTS, Spread, Step, environment, interleaved, pick_device, ratios, show_table, write_json
from contenders import METHODS, Contender, bare, peers, steppe_closure, steppe_passes

Name = tuple[str, str]  # method, contender
BARE: Name = ("", "bare")


def contenders() -> dict[Name, Contender]:
    everyone: dict[Name, Contender] = {BARE: bare(2), ("", "bare, again"): bare(2)}
    for method in METHODS:
        everyone[method, "steppe, closure"] = steppe_closure(method)
        everyone[method, "steppe, passes"] = steppe_passes(method)
        everyone |= {(method, name): build for name, build in peers(method).items()}
    return everyone


def measure(case_name: str, device: torch.device, args: argparse.Namespace, missing: set[str]) -> list[dict[str, Any]]:
    """Time all contenders on one model; one record each."""
    case = CASES[case_name]
    torch.manual_seed(0)
    start = case.build().to(device)
    x, y = case.batch_on(device)
    steps: dict[Name, Step] = {}
    for name, build in contenders().items():
        model = copy.deepcopy(start)

        def loss(model: torch.nn.Module = model) -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                return F.cross_entropy(model(x), y)

        try:
            steps[name] = build(model, loss)
        except ImportError:
            missing.add(name[1])
    joined = {" / ".join(name): step for name, step in steps.items()}
    samples = interleaved(joined, device, args.rounds, args.seconds)
    by_name = dict(zip(steps, samples.values(), strict=True))
    records = []
    for (method, contender), times in by_name.items():
        rivals = {rival[1]: by_name[rival] for rival in by_name if method and rival[0] == method}
        records.append(
            {
                "model": case_name,
                "parameters": sum(p.numel() for p in start.parameters()),
                "batch": len(y),
                "method": method or None,
                "contender": contender,
                "rounds": len(times),
                "milliseconds": asdict(Spread.of(times, 1e3)),
                "over_bare": asdict(Spread.of(ratios(times, by_name[BARE]))),
                "over": {rival: asdict(Spread.of(ratios(times, theirs))) for rival, theirs in rivals.items()},
            }
        )
    return records


def report(records: list[dict[str, Any]]) -> None:
    """One model's table."""
    first = records[0]
    title = f"{first['model']}: {first['parameters']:,} parameters, batch {first['batch']}, {first['rounds']} rounds"
    rows = []
    for r in records:
        who = f"{r['method']} {r['contender']}" if r["method"] else r["contender"]
        extra = r["milliseconds"]["median"] - first["milliseconds"]["median"]
        spread = f"{r['over_bare']['q1']:.3f} – {r['over_bare']['q3']:.3f}"
        median = f"{r['milliseconds']['median']:.3f}"
        rows.append([who, median, f"{1e3 * extra:+.0f}", f"{r['over_bare']['median']:.3f}", spread])
    show_table(title, ["two passes and a step", "ms", "over bare, µs", "ratio", "quartiles"], rows)


def verdict(records: list[dict[str, Any]], device: torch.device) -> list[str]:
    """Which targets are missed: never slower than a peer, and at most 5% over bare for models over 1M parameters.

    On a GPU the second target is for ResNet-18 only: the passes of the others are too short to hide any host time.
    """
    lines = []
    for r in records:
        if not r["contender"].startswith("steppe"):
            continue
        who = f"{r['model']}, {r['method']}, {r['contender']}"
        counts = r["model"] == "resnet18" if device.type == "cuda" else r["parameters"] > 1_000_000
        if counts and r["over_bare"]["median"] > 1.05:
            lines.append(f"{who}: {r['over_bare']['median']:.3f} of bare, target 1.05")
        for rival, over in r["over"].items():
            if not rival.startswith("steppe") and over["q1"] > 1:  # three rounds of four slower: not by chance
                lines.append(f"{who}: {over['median']:.3f} of {rival}")
    return lines


# The documentation's page


def charts(record: Record, name: str) -> Iterator[Chart]:
    """Time of a step over bare passes."""
    for method in METHODS:
        mine = [r for r in record["results"] if r["method"] == method]
        bars = medians(
            mine,
            lambda r: r["over_bare"]["median"],
            lambda r: f"{r['model']}, {count(r['parameters'])}, batch {r['batch']}",
        )
        title = f"{method}, {device_of(record)}"
        yield Chart(f"{name}-{method.lower()}", title, "time of a step", bars, "two bare passes")


PAGE = Page(
    "Time of a step",
    "A SAM step is two gradients; everything else is overhead of the library. Each bar is the median time of a step "
    "divided by the time of two bare passes and the base optimizer's step, measured in alternation in one run. 1 is "
    "the least possible.",
    charts,
    place=1,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, help="timed rounds (default: what fits into --seconds, at least 5)")
    parser.add_argument("--seconds", type=float, help="time for one model (default: 25 on a CPU, 12 on a GPU)")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    if args.rounds is not None and args.rounds < 2:
        parser.error("--rounds must be at least 2")
    device = pick_device(args.device)
    args.seconds = args.seconds or (12 if device.type == "cuda" else 25)
    records, missing = [], set()
    for name in args.models:
        records += measure(name, device, args, missing)
        report([r for r in records if r["model"] == name])
    missed = verdict(records, device)
    print("\n".join(["targets missed:", *missed] if missed else ["all targets met"]))
    if missing:
        print(f"not installed, left out: {', '.join(sorted(missing))}")
    path = args.results / f"step_overhead-{device.type}{'-bf16' if args.autocast else ''}.json"
    write_json(
        path,
        {
            "environment": environment(device),
            "autocast": "bfloat16" if args.autocast else None,
            "missing": sorted(missing),
            "targets_missed": missed,
            "results": records,
        },
    )


if __name__ == "__main__":
    main()
