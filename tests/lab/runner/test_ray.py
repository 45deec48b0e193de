"""Training on a real Ray cluster on this machine, with functions of a script; a dead cluster is reported."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from steppe.lab.records import read_records
from steppe.lab.runner.ray import next_run

pytest.importorskip("ray")

CAN_RAY_START = "import ray; ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False); ray.shutdown()"
SCRIPT = """
    import os, torch, steppe
    from torch import nn
    from dataclasses import dataclass
    from sklearn.datasets import load_digits

    @dataclass(frozen=True)
    class Mine(steppe.SAM):
        pass

    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = (x[:100].float(), y[:100]), (x[100:150].float(), y[100:150])
    home = os.getpid()

    def make():
        if DIES and os.getpid() != home:
            os._exit(1)
        return nn.Linear(64, 10)

    def compare(on):
        return steppe.compare(data, make, [Mine(rho=0.02)], on=on, jobs=1, seeds=1, epochs=2, batch=10, out=on,
                              curvature=False, equal_cost=False, device="cpu", rivals=[])

    there = compare("ray")
    here = compare("local")
    losses = [[(r["label"], r["final"]["test_loss"]) for r in result.records] for result in (there, here)]
    assert losses[0] == losses[1], losses
    assert len(losses[0]) == 2
    print("the same")
"""


def script(tmp_path, dies: bool) -> Any:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT).replace("DIES", str(dies)))
    options: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-W", "ignore", "script.py"], **options)
    if "the same" not in done.stdout and "the Ray cluster failed" not in done.stderr:
        probe = subprocess.run([sys.executable, "-c", CAN_RAY_START], **options)
        if probe.returncode != 0:
            pytest.skip(f"ray cannot start here: {probe.stderr.strip().splitlines()[-1]}")
    return done


@pytest.mark.slow
def test_functions_and_methods_of_a_script_are_trained_on_ray(tmp_path):
    done = script(tmp_path, dies=False)
    assert done.returncode == 0 and "the same" in done.stdout, done.stderr


@pytest.mark.slow
def test_dead_ray_workers_are_reported_in_one_line(tmp_path):
    done = script(tmp_path, dies=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "the Ray cluster failed (" in last, done.stderr
    assert "nothing is lost: run the same command again to resume" in last


PAPER = ("extra/frontier", "--scale", "smoke", "--cells", "digits-clean/sam-default", "--seeds", "1")


@pytest.mark.slow
def test_paper_run_trains_on_ray_what_it_trains_here(tmp_path):
    """For `steppe sweep`, test_sweep.py has such a test."""
    options: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    losses = []
    for on in ("local", "ray"):
        done = subprocess.run(
            [sys.executable, "-m", "steppe", "paper", "run", *PAPER, "--on", on, "--out", on], **options
        )
        if done.returncode and subprocess.run([sys.executable, "-c", CAN_RAY_START], **options).returncode:
            pytest.skip("ray cannot start here")
        assert done.returncode == 0, done.stderr
        losses.append({r["key"]: r["final"]["test_loss"] for r in read_records([tmp_path / on]) if r["final"]})
    assert losses[0] and losses[0] == losses[1]


class FakeRay:
    """A cluster whose head is at a port; the run ends after so many looks."""

    def __init__(self, port: int, looks: int):
        self.gcs_address, self.looks = f"127.0.0.1:{port}", looks

    def get_runtime_context(self):
        return self

    def wait(self, going, num_returns, timeout):
        self.looks -= 1
        return (going[:1], []) if self.looks < 0 else ([], going)


def test_a_dead_head_node_is_noticed_and_a_restarted_one_is_waited_for():
    """Ray itself would end the process after a minute, without a word on what to do."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        assert next_run(FakeRay(port, looks=9), ["a run", "another"]) == "a run"
    assert next_run(FakeRay(port, looks=2), ["a run"]) == "a run", "a head may be started again"
    with pytest.raises(ConnectionError, match=f"its head 127.0.0.1:{port} does not answer: ConnectionRefusedError"):
        next_run(FakeRay(port, looks=9), ["a run"])
