"""The Python on each trainer's page runs, top to bottom, as a reader would paste it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "integrations").glob("*.md"))
PAGES = [page for page in PAGES if page.stem != "more"]  # each section of it is run by the test of its trainer
NEEDS = {
    "lightning": "lightning", "fabric": "lightning", "transformers": "transformers", "accelerate": "accelerate",
    "trl": "trl", "keras": "keras",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # the trainers' own, about loaders and loggers
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_runs(page: Path, tmp_path, monkeypatch):
    if page.stem == "timm":
        importlib.import_module("integrations.test_timm")  # skips where timm cannot be imported
    else:
        monkeypatch.setenv("KERAS_BACKEND", "torch")
        pytest.importorskip(NEEDS[page.stem])
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    namespace: dict = {"__name__": __name__}
    for block in blocks:
        exec(compile(block, page.name, "exec"), namespace)
    optimizer = namespace["trainer"].optimizers[0] if page.stem == "lightning" else None
    optimizer = vars(namespace["model"])["_steppe"][1] if page.stem == "keras" else optimizer
    optimizer = optimizer or getattr(namespace.get("trainer"), "optimizer", None) or namespace["optimizer"]
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    assert optimizer.steps > 0
    assert optimizer.metrics["looks"] == 2


def test_there_is_a_page_for_each_trainer():
    folder = Path(__file__).parents[2] / "src" / "steppe" / "integrations"
    no_trainers = {"__init__", "micro_batches", "bookkeeping", "flat_lora"}
    modules = {path.stem for path in folder.glob("*.py")} - no_trainers
    assert {page.stem for page in PAGES} == modules | {"trl"}  # which needs no module of its own
