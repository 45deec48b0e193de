"""torchtitan's own trainer with the recipe of `examples/torchtitan_sam.py`: on one rank, sharded, and in a pipeline.

CI installs torchtitan in a folder of its own, because nothing else here uses what it needs.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.pages import ROOT
from steppe import SAM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan"),
]
WHERE = ["alone", "FSDP2", "pipeline"]
Run = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[Run]]:
    """What each rank of each world ended with. torchtitan changes global settings: it has processes of its own."""
    folder = tmp_path_factory.mktemp("torchtitan")
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("titan_worlds.py")), str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[Run]] = {}
    for path in sorted(folder.glob("*/*.pt")):
        found.setdefault(path.parent.name, []).append(torch.load(path))
    return found


def distance(one: Run, other: Run) -> float:
    """The largest difference of two weights. A stage of a pipeline has some of them."""
    assert one["weights"].keys() <= other["weights"].keys()
    return max((w - other["weights"][name]).abs().max().item() for name, w in one["weights"].items())


@pytest.mark.parametrize("where", WHERE)
def test_without_perturbation_it_is_torchtitan_to_the_last_bit(runs, where):
    """The losses, gradient norms and token counts that are logged, too."""
    for own, ours in zip(runs[f"torchtitan {where}"], runs[f"Plain {where}"], strict=True):
        assert distance(own, ours) == 0
        assert own["logged"] == ours["logged"]
        assert len(own["logged"]) == 3


@pytest.mark.parametrize("where", WHERE)
def test_sam_is_the_loop_by_hand(runs, where):
    """In float32, which is the trainer's: sums of micro-batches and of ranks are rounded in another order."""
    (hand,), ranks = runs["by hand"], runs[f"SAM {where}"]
    for own, ours in zip(runs[f"torchtitan {where}"], ranks, strict=True):
        assert distance(ours, hand) < 1e-5
        assert distance(ours, own) > 1e-2
        counts = [[tokens for _, tokens in run["logged"]] for run in (ours, own)]
        assert counts[0] == counts[1], "each token is counted once"
    losses = [loss for (loss, _, _), _ in ranks[-1]["logged"]]  # of a pipeline, the last stage knows it
    assert losses == pytest.approx(hand["losses"], rel=1e-5), "at the weights, not where the method looks"


def test_a_run_that_is_resumed_ends_in_the_same_bits(runs):
    """From torchtitan's own checkpoint, on two ranks, with what the method remembers."""
    for whole, resumed in zip(runs["LookSAM FSDP2"], runs["LookSAM FSDP2, resumed"], strict=True):
        assert distance(whole, resumed) == 0
        assert resumed["logged"] == whole["logged"][2:]


def test_the_command_line_finds_the_configuration(runs):
    (found,) = runs["command line"]
    assert found == {"method": str(SAM(rho=0.05)), "steps": 7, "builds": "SharpnessAwareTrainer"}


def test_methods_that_need_more_than_gradients_are_refused(runs):
    (refused,) = runs["refused"]
    assert [said.split(":")[0].split(" needs ")[1] for said in refused["said"]] == ["loss", "auxiliary"]
