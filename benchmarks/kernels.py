"""Device time of a captured step, by kernel.

    python benchmarks/kernels.py [--models mlp-3 resnet-18] [--results FOLDER]

A captured step does not wait for the host: its time is that of the kernels and of the gaps between them. Measured for
a captured plain step, for captured SAM, and for captured SAM with a compiled model: milliseconds per step without a
profiler; and with a profiler the number of kernels, how long the device is busy with them, and their kinds. For
comparison, eager SAM by other libraries: it runs the same kernels, but the device waits for the host most of the time.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from captured import Bench
from charts import Chart, Page, Record, device_of
from common import RESULTS, Spread, Step, environment, interleaved, pick_device, show_table, write_json
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import steppe

# Kinds of kernels by patterns of their names; the first that fits counts
KINDS = {
    "normalisation, fused by the compiler": r"^triton_(?!tem).*(batch_?norm|layer_?norm|var_mean)",
    "others fused by the compiler": r"^triton_(?!tem)",
    "changes of memory layout": r"nhwcTo|nchwTo|AddPadding",
    "attention": r"sdpa|flash|fmha|attention",  # before convolutions: cuDNN calls its passes fprop and bprop too
    "convolutions": r"convolve|dgrad|wgrad|fprop|implicit|winograd|cudnn.*xmma|_conv2d",
    "matrix products": r"gemm|gemv|cutlass|xmma|nvjet|splitK|triton_tem|_mm_",
    "normalisation": r"batch_?norm|bn_fw|bn_bw|layer_?norm",
    "all weights at once": r"multi_tensor|foreach|lpnorm|FusedAdam|FusedSgd",
    "sums": r"reduce|softmax|nll_loss|welford",
    "copies": r"memcpy|memset|copy|fill|cat",
    "one operation on one tensor": r"elementwise|threshold|vectorized",
}


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    fits = (kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE))
    return next(fits, "other")


def kernels(step: Step, repeats: int = 20, longest: int = 12) -> dict[str, Any]:
    """The kernels of a step, and microseconds of device time by kind."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    events = [e for e in seen.key_averages() if e.device_type == DeviceType.CUDA]
    kinds: dict[str, dict[str, float]] = {}
    for event in events:
        kind = kinds.setdefault(kind_of(event.key), {"kernels": 0.0, "us": 0.0})
        kind["kernels"] += event.count / repeats
        kind["us"] += event.self_device_time_total / repeats
    ordered = sorted(events, key=lambda e: -e.self_device_time_total)
    return {
        "kernels": sum(e.count for e in events) / repeats,
        "busy_us": sum(e.self_device_time_total for e in events) / repeats,
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1]["us"])),
        "longest": [
            {"name": e.key[:90], "kernels": e.count / repeats, "us": e.self_device_time_total / repeats}
            for e in ordered[:longest]
        ],
    }


def contenders(bench: Bench) -> dict[str, Step]:
    return {
        "base, captured": bench.step_of(steppe.Plain(), True),
        "SAM, captured": bench.step_of(steppe.SAM(), True),
        "SAM, captured and compiled": bench.step_of(steppe.SAM(), True, True),
        **bench.peers(),
    }


# The documentation's page


def charts(record: Record, name: str) -> Iterator[Chart]:
    """Time of a step and of its kernels, and what the kernels of captured steps do."""
    for model in dict.fromkeys(r["model"] for r in record["results"]):
        times: dict[str, dict[str, float]] = {}
        kinds: dict[str, dict[str, float]] = {}
        for r in (r for r in record["results"] if r["model"] == model):
            label = f"{r['contender']}, {r['kernels']:.0f} kernels"
            times[label] = {"a step": r["milliseconds"]["median"], "the device at work": r["busy_us"] / 1e3}
            who, captured, compiled = r["contender"].partition(", captured")
            if captured:
                for kind, spent in r["kinds"].items():
                    kinds.setdefault(kind, {})[f"{who}{compiled}"] = spent["us"]
        title = f"{model}, {device_of(record)}"
        yield Chart(f"{name}-{model}", title, "milliseconds per step", times, logarithmic=True)
        yield Chart(f"{name}-{model}-kinds", f"{model}, captured, by kind of kernel", "microseconds per step", kinds)


PAGE = Page(
    "Device time",
    "A captured step keeps the device busy from its first kernel to its last. Its time is the time of its kernels: two "
    "passes, the base optimizer's step, and for SAM a copy of the weights and back, the norm, and the perturbation. "
    "The peers run about the same kernels, but for most of their step the device waits for the host. The speed-up of a "
    "captured step therefore depends on the host as much as on the step, and differs between machines.",
    charts,
    place=4,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp-3", "resnet-18"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    device = pick_device("cuda")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    records: list[dict[str, Any]] = []
    for name in args.models:
        bench = Bench(name, device)
        steps = contenders(bench)
        times = interleaved(steps, device, None, 2.0)
        shown = []
        for who, step in steps.items():
            spread, found = Spread.of(times[who], 1e3), kernels(step)
            records.append({"model": name, "contender": who, "milliseconds": asdict(spread), **found})
            kinds = ", ".join(f"{kind} {k['us']:.0f} ({k['kernels']:.0f})" for kind, k in found["kinds"].items())
            shown.append([who, f"{spread.median:.3f}", f"{found['kernels']:.0f}", f"{found['busy_us']:.0f}", kinds])
        show_table(f"{name}, batch {bench.batch}", ["step", "ms", "kernels", "busy, µs", "kinds: µs (kernels)"], shown)
        torch._dynamo.reset()
    write_json(args.results / "kernels-cuda.json", {"environment": environment(device), "results": records})


if __name__ == "__main__":
    main()
