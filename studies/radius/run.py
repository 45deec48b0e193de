"""All trainings of the study, by stage. Resumable: what a record file holds already is not trained again.

    PYTHONPATH=src python studies/radius/run.py STAGE --out FOLDER [--data FOLDER] [--device cuda] [--workers 8]

One JSON line for each regime and candidate, with a list over seeds; each worker appends to a file of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from stages import STAGES
from train import Job, train


def done(folder: Path) -> set[tuple[str, str, str]]:
    """Regime, candidate and seeds of every record there is."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines() if line]
    return {_key(record["regime"], record["candidate"], record["seeds"]) for record in map(json.loads, lines)}


def _key(regime: str, candidate: str, seeds: object) -> tuple[str, str, str]:
    return regime, candidate, ",".join(map(str, seeds))  # type: ignore[call-overload]


def finished(job: Job, there: set[tuple[str, str, str]]) -> bool:
    """Whether all of a job's records are there."""
    return all(_key(r.name, job.text(s), job.seeds) in there for r in job.regimes for s in job.settings)


def work(jobs: list[Job], options: argparse.Namespace, path: Path) -> None:
    """Train these, one after another."""
    torch.set_num_threads(1)
    hardware = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    if options.device == "cuda" and options.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    # HVPs by difference need a longer step where products are rounded
    precision = "float16" if options.precision == "tf32" else "float32"
    for job in jobs:
        if time.time() > options.until:
            print("out of time before", job.regimes[0].name, job.method, job.fixed, flush=True)
            continue
        began = time.perf_counter()
        records = train(job, options.data, options.device, precision)
        with path.open("a") as file:
            for record in records:
                record |= {"stage": options.stage, "precision": options.precision, "hardware": hardware}
                file.write(json.dumps(record | {"commit": options.commit}, separators=(",", ":")) + "\n")
        seconds = time.perf_counter() - began
        print(f"{seconds:.1f} s", job.regimes[0].name, job.text(job.settings[0]), flush=True)


def main() -> None:
    """Share a stage's jobs among processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("float32", "tf32"), default="float32")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no training after so many")
    parser.add_argument("--until", type=float)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    options.until = options.until or time.time() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker is None and options.workers > 1:
        command = [sys.executable, __file__, *sys.argv[1:], "--until", str(options.until)]
        running = [subprocess.Popen([*command, "--worker", str(i)]) for i in range(options.workers)]
        sys.exit(max(process.wait() for process in running))
    there = done(options.out)
    jobs = [job for job in STAGES[options.stage]() if not finished(job, there)]
    mine = options.worker or 0
    work(jobs[mine :: options.workers], options, options.out / f"{options.stage}-{mine}.jsonl")


if __name__ == "__main__":
    main()
