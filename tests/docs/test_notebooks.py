"""The notebooks run, as the site's build runs them, and show what they computed."""

from __future__ import annotations

import os

import pytest

from helpers.pages import making
from steppe import Method

notebooks = making("notebooks")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in notebooks.FOLDER.glob("*.py")))
def test_a_notebook_runs(name):
    here, known = os.getcwd(), dict(Method.registry)
    shown = notebooks.run(name)
    assert os.getcwd() == here and Method.registry == known
    text = "\n".join(shows for _, _, shows in shown)
    for word in ("TwoSided", "ASAM rho=1.0", "verdict", "test_accuracy", "report.html", "on held-out training data"):
        assert word in text, word


def test_cells_are_text_and_code():
    text = "# %% [markdown]\n# A title\n#\n# More.\n\n# %%\nx = 1\nx + 1\n\n# %%\nprint('a')\n# %%\n\n"
    assert notebooks.cells(text) == [("markdown", "A title\n\nMore."), ("code", "x = 1\nx + 1"), ("code", "print('a')")]
    names: dict = {}
    assert notebooks._shown("x = 1\nx + 1", names) == "2" and notebooks._shown("print(x)\nNone", names) == "1"
