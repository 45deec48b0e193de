"""Runs every test of this folder on two ranks, or on as many as its mark says: ``@pytest.mark.ranks(8)``.

The tests read like ordinary ones and say what a *rank* does. The pytest you start does not run their bodies. It
launches pytest again in two processes, the ranks, with the same selection of tests. Each test then reports the results
of its ranks. One launch serves all tests of the session that want the same number of ranks, because starting torch
takes long. Each test still passes or fails alone, with the traceback of the rank that failed.

A rank that fails closes its process group, so that the other ranks, which wait in a collective, fail at once instead
of hanging. All then make a new group and continue with the next test. A rank that hangs nevertheless is ended by the
timeout of gloo, or by the launcher when no test has ended for a long time. Both timeouts are generous: a busy machine
must not fail a test.
"""

from __future__ import annotations

import fcntl
import json
import os
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
FORK = HERE.parent / "helpers" / "fork_ranks.py"
COLLECTIVE_TIMEOUT = 300  # seconds that a rank waits for the others
STALL_TIMEOUT = 900  # seconds without a finished test after which the launch is ended
SCRATCH = "STEPPE_RANKS"  # set on the ranks: the folder with the selection and the results

ON_A_RANK = SCRATCH in os.environ
Results = dict[str, dict[str, str]]  # the failures of each test by rank, "" if it passed
_results: dict[int, Results] = {}  # by the number of ranks


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n): the number of processes that a distributed test runs on")


def _ranks(item: pytest.Item) -> int:
    mark = item.get_closest_marker("ranks")
    return 2 if mark is None else mark.args[0]


@pytest.hookimpl(tryfirst=True)  # before tests that are slow are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not ON_A_RANK:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.slow)
        return
    wanted = set(json.loads(_scratch("selection.json").read_text()))
    items[:] = [item for item in items if item.nodeid in wanted]


# The pytest that the user started


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if ON_A_RANK or HERE not in pyfuncitem.path.parents:
        return None
    ranks = _ranks(pyfuncitem)
    if ranks not in _results:
        _results[ranks] = _on_ranks(ranks, pyfuncitem.session)
    said = _results[ranks][pyfuncitem.nodeid]
    if any(said.values()):
        pytest.fail("\n".join(f"{who}: {what}" for who, what in said.items() if what), pytrace=False)
    return True


def _on_ranks(ranks: int, session: pytest.Session) -> Results:
    """Run all tests that want this many ranks. With pytest-xdist, one launch serves all workers."""
    selection = [item.nodeid for item in session.items if HERE in item.path.parents and _ranks(item) == ranks]
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        with tempfile.TemporaryDirectory() as folder:
            return _launch_until_done(ranks, Path(folder), session.config.rootpath, selection)
    folder = Path(tempfile.gettempdir()) / f"steppe-{run}-{ranks}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "all.json"
        if not done.exists():
            done.write_text(json.dumps(_launch_until_done(ranks, folder, session.config.rootpath, selection)))
        return json.loads(done.read_text())


def _launch_until_done(ranks: int, folder: Path, root: Path, selection: list[str]) -> Results:
    """Launch until all tests are done. A test that ended its launch has failed; the tests after it get a new launch."""
    results: Results = {test: {} for test in selection}
    while selection:
        end = _launch(ranks, folder, root, selection)
        for rank in range(ranks):
            for line in _lines(folder / f"rank{rank}.jsonl"):
                entry = json.loads(line)
                said = results[entry["test"]]
                said[f"rank {rank}"] = said.get(f"rank {rank}", "") + entry["failure"]
            (folder / f"rank{rank}.jsonl").unlink(missing_ok=True)
        left = [test for test in selection if len(results[test]) < ranks]
        lost = left if left == selection else left[:1]  # no test was done: another launch would not help
        for test in lost:
            results[test]["launch"] = end
        selection = left[len(lost) :]
    return results


def _launch(ranks: int, folder: Path, root: Path, selection: list[str]) -> str:
    """Run tests on some ranks, as far as possible; return how the launch ended."""
    (folder / "selection.json").write_text(json.dumps(selection))
    # Without the project's own options: the tests are selected already, and a rank is one process.
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--rootdir={root}"]
    options += ["-o", "addopts=--import-mode=importlib"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here: it outlives any rank
    env |= {SCRATCH: str(folder), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env |= {"WORLD_SIZE": str(ranks)}
    files = sorted({str(root / test.split("::")[0]) for test in selection})  # importing the others takes seconds
    with open(folder / "log", "w") as log:
        command = [sys.executable, str(FORK), str(ranks), *options, *files]
        launch = subprocess.Popen(command, stdout=log, stderr=log, cwd=root, env=env)
        stalled = _wait(launch, ranks, folder)
    end = f"made no progress for {STALL_TIMEOUT} s" if stalled else f"ended with {launch.returncode}"
    log_text = (folder / "log").read_text()
    excerpt = log_text if len(log_text) < 8000 else f"{log_text[:5000]}\n...\n{log_text[-3000:]}"
    return f"it {end} in this test. Its output:\n{excerpt}"


def _wait(launch: subprocess.Popen, ranks: int, folder: Path) -> bool:
    """Wait for the ranks to end. If they stall, end them and return True."""
    size, since = 0, time.monotonic()
    try:
        while launch.poll() is None:
            time.sleep(0.1)
            now = sum(len(_lines(folder / f"rank{rank}.jsonl")) for rank in range(ranks))
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > STALL_TIMEOUT:
                return True
        return False
    finally:  # stalled, or Ctrl-C here, or one rank has failed and the others may wait for it
        if launch.poll() is None:
            launch.terminate()  # it ends the ranks
            launch.wait()


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
        session.exitstatus = 0  # failures are in the results; a bad status would end the others


_store: dist.Store | None = None
_tests_begun = 0


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """A working process group, with all ranks at the same test."""
    if not ON_A_RANK:
        yield
        return
    global _store, _tests_begun
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if _store is None:
        patience = timedelta(seconds=2 * COLLECTIVE_TIMEOUT)
        _store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience)
    _tests_begun += 1
    # Meet through the store, which survives a broken group, and find out whether the last test broke the group.
    _store.set(f"{_tests_begun}/{rank}", "well" if dist.is_initialized() else "broken")
    states = [_store.get(f"{_tests_begun}/{r}") for r in range(ranks)]
    if b"broken" in states:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"group{_tests_begun}", _store),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
        )
    torch.manual_seed(0)
    yield
