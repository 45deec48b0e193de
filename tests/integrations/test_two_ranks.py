"""Trainers on two ranks, with DDP and with FSDP2, are the plain loop on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

for package in ("lightning", "transformers", "accelerate"):
    pytest.importorskip(package)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_two_ranks_train_as_the_plain_loop_does(tmp_path):
    here = Path(__file__).parent
    paths = [str(here.parent), str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*torchrun, str(here / "two_ranks.py"), str(tmp_path)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3600, cwd=tmp_path,
    )  # fmt: skip
    results = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(tmp_path.glob("rank*"))]
    failures = "\n".join(f"{name}: {said}" for rank in results for name, said in rank if said)
    assert not failures, failures
    assert run.returncode == 0, run.stdout[-4000:]
    assert len(results) == 2
    assert [name for name, _ in results[0]] == [name for name, _ in results[1]]
    trainers = {name.split("-")[0] for name, _ in results[0]}
    assert trainers == {
        "lightning_ddp", "lightning_fsdp2", "lightning_fsdp2_resumes", "transformers_ddp", "accelerate_ddp"
    }  # fmt: skip
