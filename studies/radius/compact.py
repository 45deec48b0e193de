"""Make records small enough to keep: accuracies of every seed, curves as means over seeds, and where each ρ ended.

    python studies/radius/compact.py RAW... --commits stage=hash ... --out FOLDER

One file a stage. A training that was run twice counts once (the later one).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

CURVES = ("rho", "train_loss", "held_loss", "rise")


def compacted(record: dict, commits: dict[str, str]) -> dict:
    """A record without the seeds' own curves."""
    small = {name: value for name, value in record.items() if name not in CURVES}
    for name in CURVES:
        if name in record:
            small[name] = [round(mean(column), 4) for column in zip(*record[name], strict=True)]
    if "rho" in record:
        small["rho_at_the_end"] = [round(curve[-1], 3) for curve in record["rho"]]
    return small | {"commit": commits.get(record["stage"], record.get("commit", ""))}


def main() -> None:
    """Read, make small, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("raw", nargs="+", type=Path)
    parser.add_argument("--commits", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    commits = dict(pair.split("=") for pair in options.commits)
    latest: dict[tuple, dict] = {}
    for path in options.raw:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            latest[record["regime"], record["candidate"], tuple(record["seeds"])] = record
    stages = defaultdict(list)
    for record in latest.values():
        stages[record["stage"]].append(compacted(record, commits))
    options.out.mkdir(parents=True, exist_ok=True)
    for stage, records in stages.items():
        lines = [json.dumps(record, separators=(",", ":")) for record in records]
        (options.out / f"{stage}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
