"""The Python of every page runs, block after block, as a reader would type it."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch
import torch.distributed as dist

from helpers.pages import DOCS, blocks, pages_with_code
from steppe import Method

# What a page takes for granted: the reader's own model and data.
GIVEN = {
    "curvature.md": """
import copy
import torch
from sklearn.datasets import load_iris
from torch.utils.data import DataLoader, TensorDataset
from steppe.curvature import Monitor, Objective

x, y = load_iris(return_X_y=True)
x, y = torch.tensor(x).float(), torch.tensor(y)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
loader = DataLoader(TensorDataset(x, y), batch_size=50)
sample = (x[::10], y[::10])
objective = a = Objective(model, torch.nn.functional.cross_entropy, sample)
b = Objective(copy.deepcopy(model), torch.nn.functional.cross_entropy, sample)
snapshots, steps = [], 200
for _ in range(4):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    snapshots.append(copy.deepcopy(model.state_dict()))
""",
}


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder, a module, one process of one rank; and nothing of it left for other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # other tests too call a user's module so
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look their module up
    known, loaded, threads = dict(Method.registry), set(sys.modules), torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)
    Method.registry.clear()
    Method.registry.update(known)
    for name in set(sys.modules) - loaded:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", pages_with_code(), ids=lambda page: page.stem)
def test_the_page_runs(page, alone):
    name = str(page.relative_to(DOCS))
    exec(compile(GIVEN.get(name, ""), f"before {name}", "exec"), vars(alone))
    for line, needs, code in blocks(page):
        if not needs or has_torch(needs):
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), vars(alone))


def has_torch(needs: str) -> bool:
    """Whether a block only needs a version of torch, and this one is new enough."""
    found = re.fullmatch(r"needs torch (\d+)\.(\d+)", needs)
    return found is not None and tuple(map(int, torch.__version__.split(".")[:2])) >= tuple(map(int, found.groups()))


def test_a_block_that_needs_a_torch_runs_where_there_is_one():
    assert has_torch("needs torch 2.6") and not has_torch("needs torch 99.0")
    assert not has_torch("needs a GPU") and not has_torch("needs torch 2.6 and a GPU")


def test_only_marked_blocks_are_left_out():
    """A block that is not run states on the page what it needs."""
    left_out = [(page.name, needs) for page in pages_with_code() for _, needs, _ in blocks(page) if needs]
    known = ("GPU", "CUDA", "network", "compiler", "processes", "torch ")
    assert [(page, needs) for page, needs in left_out if not any(word in needs for word in known)] == []


def test_pages_are_found_and_a_wrong_one_fails(tmp_path, alone):
    assert {"index.md", "choose.md", "how.md", "scale.md", "writing.md", "curvature.md"} <= {
        page.name for page in pages_with_code()
    }
    page = tmp_path / "page.md"
    page.write_text('```python\nx = 1\n```\n```python title="needs a GPU"\nx = 2\n```\n```bash\nno\n```\n')
    assert blocks(page) == [(2, "", "x = 1\n"), (5, "needs a GPU", "x = 2\n")]
