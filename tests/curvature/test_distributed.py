"""Two ranks with unequal shares of the data measure what one rank with all of it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers.curvature_problems import digits, mlp
from steppe.curvature import Hessian, eigenvalues, surrogate_gap, trace


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_two_ranks_measure_what_one_does(tmp_path):
    here = Path(__file__).parent
    paths = [str(here.parent), str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here / "two_ranks.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, second = (json.loads(o.split("RESULT")[1].splitlines()[0]) for o in outputs)
    assert first == second
    assert first["reductions"] == 1
    assert first["nan"] == "the loss is nan at t"
    # An FSDP2 model is refused with advice that works.
    assert "get_model_state_dict" in first["said"] and "is sharded" in first["said"]
    assert first["gathered"] == first["product"]
    torch.manual_seed(0)
    H = Hessian(mlp(4).double(), F.cross_entropy, digits(40, side=4))
    product = H @ torch.linspace(-1, 1, H.shape[0], dtype=torch.float64)
    assert torch.allclose(torch.tensor(first["product"], dtype=torch.float64), product, atol=1e-13)
    assert first["loss"] == pytest.approx(float(H.objective.loss()), rel=1e-12)
    assert first["top"] == pytest.approx(eigenvalues(H, 2).values.tolist(), rel=1e-8)
    assert first["trace"] == pytest.approx(trace(H, rtol=0.05).value, rel=1e-8)
    assert first["gap"] == pytest.approx(surrogate_gap(H.objective, 0.05).gap, rel=1e-8)
