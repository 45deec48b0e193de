"""The example for many ranks trains as one process does, whatever mesh it is given."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.pages import ROOT


def losses(ranks: int, *options: str) -> list[float]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, str(ROOT / "examples" / "scale.py"), "--steps=2", *options]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.slow
def test_a_mesh_trains_as_one_process():
    """Pipeline and tensor parallelism: all ranks see the same batch, so the losses are those of one process."""
    alone = losses(1, "--pipeline=1", "--tensor=1")
    assert len(alone) == 2
    assert losses(4, "--pipeline=2", "--tensor=2") == pytest.approx(alone, abs=2e-5)
