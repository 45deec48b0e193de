"""The peak memory of a step beyond that of the base optimizer's step.

    python benchmarks/peak_memory.py [--device cpu|cuda] [--models resnet18 transformer-1b ...]

On a GPU: the peak of the bytes requested from the allocator in one step after warm-up (the JSON also has the peak of
the allocated blocks, which for small models is mostly rounding). On a CPU, where the allocator has no statistics: the
largest number of bytes in live tensors at the end of any operation (scratch memory inside an operation is not seen).
Peaks are given in units of the parameters' bytes, minus the base optimizer's own peak. Data are random tensors.
"""

from __future__ import annotations

import argparse
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from charts import Chart, Page, Record, device_of, medians
from common import CASES, LARGE, RESULTS, Case, environment, pick_device, show_table, write_json
from contenders import METHODS, Contender, bare, peers, steppe_closure, steppe_passes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TARGETS = {"SAM": 1.1, "GSAM": 2.1}  # parameter bytes over base


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the live tensors that were created under it."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


REQUESTED, BLOCKS = "requested_bytes.all", "allocated_bytes.all"


def one_run(case: Case, build: Contender, device: torch.device, meter: LiveBytes | None) -> tuple[int, int, int]:
    """The peak of a step after two warm-up steps, in requested bytes and in blocks; and the bytes of the parameters."""
    torch.manual_seed(0)
    model = case.build().to(device)
    x, y = case.batch_on(device)
    step = build(model, lambda: F.cross_entropy(model(x), y))
    for _ in range(2):
        step()
    if meter is None:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        meter.peak = meter.now
    step()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if meter is not None:
        return meter.peak, meter.peak, size
    stats = torch.cuda.memory_stats(device)
    return stats[f"{REQUESTED}.peak"], stats[f"{BLOCKS}.peak"], size


def peak_bytes(case: Case, build: Contender, device: torch.device) -> tuple[int, int, int]:
    """Peaks and parameter bytes of one contender, without what was allocated before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats(device)
        peak, blocks, size = one_run(case, build, device, None)
        return peak - before[f"{REQUESTED}.current"], blocks - before[f"{BLOCKS}.current"], size
    with LiveBytes() as meter:
        return one_run(case, build, device, meter)


def measure(case_name: str, device: torch.device, missing: set[str]) -> list[dict[str, Any]]:
    """The peaks of all contenders on one model; one record each."""
    case = (CASES | LARGE)[case_name]
    base = bare(1)
    peak_bytes(case, base, device)  # a first time, so that libraries allocate their workspaces
    reference, reference_blocks, size = peak_bytes(case, base, device)
    everyone: list[tuple[str | None, str, Contender]] = [(None, "base", base)]
    for method in METHODS:
        everyone.append((method, "steppe, closure", steppe_closure(method)))
        everyone.append((method, "steppe, passes", steppe_passes(method)))
        everyone += [(method, name, build) for name, build in peers(method).items()]
    records = []
    for method, contender, build in everyone:
        try:
            peak, blocks, _ = peak_bytes(case, build, device)
        except ImportError:
            missing.add(contender)
            continue
        records.append(
            {
                "model": case_name,
                "batch": case.batch[device.type],
                "parameter_bytes": size,
                "method": method,
                "contender": contender,
                "peak_bytes": peak,
                "extra_in_parameter_bytes": (peak - reference) / size,
                "extra_in_blocks": (blocks - reference_blocks) / size,
            }
        )
    return records


def report(records: list[dict[str, Any]]) -> None:
    """One model's table."""
    first = records[0]
    title = f"{first['model']}: {first['parameter_bytes'] / 1e6:.2f} MB of parameters, batch {first['batch']}"
    rows = [
        [f"{r['method'] or ''} {r['contender']}".strip(), f"{r['peak_bytes'] / 1e6:.2f}",
         f"{r['extra_in_parameter_bytes']:+.3f}"]
        for r in records
    ]  # fmt: skip
    show_table(title, ["step", "peak, MB", "over base, in parameter bytes"], rows)


# The documentation's page


def charts(record: Record, name: str) -> Iterator[Chart]:
    """Peak memory over the base optimizer's."""
    for method in METHODS:
        mine = [r for r in record["results"] if r["method"] == method]
        bars = medians(mine, lambda r: r["extra_in_parameter_bytes"], lambda r: f"{r['model']}, batch {r['batch']}")
        axis = "extra peak memory, in copies of the parameters"
        yield Chart(f"{name}-{method.lower()}", f"{method}, {device_of(record)}", axis, bars, "one copy")


PAGE = Page(
    "Memory",
    "Peak memory of a step beyond the base optimizer's, in copies of the parameters.",
    charts,
    place=7,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=list(CASES | LARGE), default=list(CASES))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    device = pick_device(args.device)
    records, missing = [], set()
    for name in args.models:
        records += measure(name, device, missing)
        report([r for r in records if r["model"] == name])
    missed = [
        f"{r['model']}, {r['method']}, {r['contender']}: {r['extra_in_parameter_bytes']:.3f}, "
        f"target {TARGETS[r['method']]}"
        for r in records
        if r["contender"].startswith("steppe") and r["extra_in_parameter_bytes"] > TARGETS[r["method"]]
    ]
    print("\n".join(["targets missed:", *missed] if missed else ["all targets met"]))
    if missing:
        print(f"not installed, left out: {', '.join(sorted(missing))}")
    write_json(
        args.results / f"peak_memory-{device.type}.json",
        {
            "environment": environment(device),
            "missing": sorted(missing),
            "targets_missed": missed,
            "results": records,
        },
    )


if __name__ == "__main__":
    main()
