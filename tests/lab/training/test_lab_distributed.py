"""Two processes train as one does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers.small_task import environment
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.records import read_records
from steppe.lab.runner.jobs import Job, Place
from steppe.lab.runner.local import train_jobs

# What each of two ranks does: DDP and FSDP2, stopped in the middle and started again; then the command itself.
RANK = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from steppe.lab.training.ranks import join
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.run import Run

folder = Path(sys.argv[1])
for kind in ("ddp", "fsdp2"):
    ranks = join(kind, "cpu")
    recipe = Recipe(**%r)
    stopped = Run(recipe, folder / kind, ranks=ranks).train()
    for _ in range(8):
        next(stopped)
    stopped.close()
    again = Run(recipe, folder / kind, ranks=ranks)
    assert len(again.record["epochs"]) == 1
    for _ in again.train():
        pass
    del stopped, again
from steppe.cli.app import app
app(sys.argv[2:], standalone_mode=False)
"""
SETTINGS = {
    "data": "helpers.small_task:data", "model": "mlp-6", "method": "gam:period=2", "base": "adam",
    "precision": "float64", "batch": 64, "epochs": 2,
}  # fmt: skip


@pytest.mark.slow
def test_ranks_together_are_one_process(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK % (SETTINGS,))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    flags = {name: value for name, value in SETTINGS.items() if name != "method"}
    command = ["train", "--distributed", "ddp", "--method", "sam", "--out", str(tmp_path / "command"), "--no-curvature"]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    said = subprocess.run(
        [*torchrun, str(tmp_path), *command],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    assert said.stdout.count("test accuracy") == 1, "only rank 0 speaks"
    for folder, method in {"ddp": "gam:period=2", "fsdp2": "gam:period=2", "command": "sam"}.items():
        (record,) = read_records(tmp_path / folder)
        recipe = Recipe.of(record["recipe"])
        assert recipe.method == method and record["status"] == "done"
        (alone,) = train_jobs([Job(recipe)], Place(tmp_path / f"{folder}-alone"))
        alone = json.loads(json.dumps(alone))
        for one, other in zip(record["epochs"], alone["epochs"], strict=True):
            for name in ("train_loss", "test_loss"):  # GAM's differences of gradients magnify rounding
                assert one[name] == pytest.approx(other[name], rel=1e-6), (folder, one["epoch"], name)
            for name in ("train_accuracy", "test_accuracy", "gradients", "lr"):
                assert one.get(name) == other.get(name) is not None, (folder, one["epoch"], name)
        assert [path.suffix for path in (tmp_path / folder).iterdir() if path.is_file()] == [".json"]
