"""Runs every test of this folder on two ranks.

The tests read like ordinary ones and say what a *rank* does. The pytest you start does not run their bodies: it
launches itself once more under torchrun, on two gloo processes, with the same selection of tests, and each test
then reports what its two ranks said. One launch serves the whole session, because starting torch is what takes
long; each test still passes or fails alone, with the traceback of the rank that failed.

A rank that fails closes its process group, so that its peer, waiting in a collective, fails at once instead of
hanging; both then make a new group and go on with the next test. A rank that hangs all the same is ended by
gloo's timeout, or by the launcher when no test has ended for a while.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
RANKS = 2
COLLECTIVE_TIMEOUT = 30  # seconds that a rank waits for the other
STALL_TIMEOUT = 120  # seconds without a finished test (or a started rank) after which the launch is given up
SCRATCH = "STEPPE_TWO_RANKS"  # set on the ranks: the folder where they find the selection and leave the results

ON_A_RANK = SCRATCH in os.environ
_results: dict[str, dict[str, str]] | None = None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not ON_A_RANK:
        return
    wanted = set(json.loads(_scratch("selection.json").read_text()))
    items[:] = [item for item in items if item.nodeid in wanted]


# The pytest that was started by hand


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if ON_A_RANK or HERE not in pyfuncitem.path.parents:
        return None
    global _results
    if _results is None:
        _results = _two_ranks(pyfuncitem.session)
    said = _results[pyfuncitem.nodeid]
    if any(said.values()):
        pytest.fail("\n".join(f"{who}: {what}" for who, what in said.items() if what), pytrace=False)
    return True


def _two_ranks(session: pytest.Session) -> dict[str, dict[str, str]]:
    """What the ranks said about each test, "" where it passed. With pytest-xdist, one launch for all workers."""
    selection = [item.nodeid for item in session.items if HERE in item.path.parents]
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        with tempfile.TemporaryDirectory() as folder:
            return _launch_until_done(Path(folder), session.config.rootpath, selection)
    folder = Path(tempfile.gettempdir()) / f"steppe-{run}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "all.json"
        if not done.exists():
            done.write_text(json.dumps(_launch_until_done(folder, session.config.rootpath, selection)))
        return json.loads(done.read_text())


def _launch_until_done(folder: Path, root: Path, selection: list[str]) -> dict[str, dict[str, str]]:
    """A test that takes its launch down has failed; those after it get another launch."""
    results: dict[str, dict[str, str]] = {test: {} for test in selection}
    while selection:
        end = _launch(folder, root, selection)
        for rank in range(RANKS):
            for line in _lines(folder / f"rank{rank}.jsonl"):
                entry = json.loads(line)
                said = results[entry["test"]]
                said[f"rank {rank}"] = said.get(f"rank {rank}", "") + entry["failure"]
            (folder / f"rank{rank}.jsonl").unlink(missing_ok=True)
        left = [test for test in selection if len(results[test]) < RANKS]
        lost = left if left == selection else left[:1]  # nothing done at all: another launch will not do better
        for test in lost:
            results[test]["launch"] = end
        selection = left[len(lost) :]
    return results


def _launch(folder: Path, root: Path, selection: list[str]) -> str:
    """Run tests on two ranks, as far as they get; say how it ended."""
    (folder / "selection.json").write_text(json.dumps(selection))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--rootdir={root}"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    env |= {SCRATCH: str(folder), "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "w") as log:
        command = [*torchrun, "-m", "pytest", *options, str(HERE)]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=root, env=env, start_new_session=True)
        stalled = _wait(process, folder)
    end = f"made no progress for {STALL_TIMEOUT} s" if stalled else f"ended with status {process.returncode}"
    log_text = (folder / "log").read_text()
    excerpt = log_text if len(log_text) < 8000 else f"{log_text[:5000]}\n...\n{log_text[-3000:]}"
    return f"it {end} in this test. What it had to say:\n{excerpt}"


def _wait(process: subprocess.Popen, folder: Path) -> bool:
    """Wait for the launch to end; end it, and say True, when it stalls."""
    size, since = 0, time.monotonic()
    try:
        while process.poll() is None:
            time.sleep(0.1)
            now = sum(len(_lines(folder / f"rank{r}.jsonl")) for r in range(RANKS))
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > STALL_TIMEOUT:
                return True
        return False
    finally:
        if process.poll() is None:  # stalled, or Ctrl-C here: end the ranks too
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# A rank


def _scratch(name: str) -> Path:
    return Path(os.environ[SCRATCH]) / name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if ON_A_RANK:
        if report.failed and dist.is_initialized():
            dist.destroy_process_group()
        if report.when == "call" or not report.passed:
            failure = f"({report.when}) {report.longreprtext}\n" if not report.passed else ""
            with open(_scratch(f"rank{os.environ['RANK']}.jsonl"), "a") as results:
                entry = {"test": item.nodeid, "failure": failure, "seconds": report.duration}
                results.write(json.dumps(entry) + "\n")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if ON_A_RANK:
        if dist.is_initialized():
            dist.destroy_process_group()
        session.exitstatus = 0  # what failed has been said; a bad status would make torchrun end the other rank


_store: dist.Store | None = None
_tests_begun = 0


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """A working process group, and the ranks at the same test."""
    if not ON_A_RANK:
        yield
        return
    global _store, _tests_begun
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if _store is None:
        _store = next(iter(dist.rendezvous("env://")))[0]
        _store.set_timeout(timedelta(seconds=2 * COLLECTIVE_TIMEOUT))
    _tests_begun += 1
    # Meet through the store, which survives a broken group, and learn whether the last test broke it.
    _store.set(f"{_tests_begun}/{rank}", "well" if dist.is_initialized() else "broken")
    states = [_store.get(f"{_tests_begun}/{r}") for r in range(RANKS)]
    if b"broken" in states:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"group{_tests_begun}", _store),
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
        )
    torch.manual_seed(0)
    yield
