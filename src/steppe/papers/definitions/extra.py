"""Tables of no single paper: all methods at equal cost with their final curvature, the map, and tables of others."""

from __future__ import annotations

from ...lab.recipe.method_text import canonical
from ...lab.recipe.recipe import Recipe
from ...lab.runner.comparison import plan
from ...lab.training.final_curvature import Measuring
from ..experiment import SETS, Cell, Experiment
from . import published
from .frontier import FRONTIER

TITLE = "Extra · methods at equal cost"
_RECIPE = Recipe(
    data=f"{SETS}:cifar10", model="cnn-5", base="adam", lr=1e-3, batch=100, epochs=20, auxiliary="previous"
)
# Landscape and density are not kept; eigenvalue and trace need fewer products.
_LIGHT = Measuring(points=0, dimension=8)
METHODS = (
    "sam:rho=0.05", "asam", "ssam", "gsam:rho=0.05,alpha=0.2", "gnp", "crsam", "gnam:rho=0.04", "gnamfast", "gam",
    "gam:period=10,lr_times_period=true", "frobsam", "tracesam", "detsam", "looksam:alpha=0.7", "fsam", "wsam",
    "every:k=10,method=(gnamfast)",
)  # fmt: skip


def _cells() -> tuple[Cell, ...]:
    cells = []
    for job in plan(_RECIPE, [canonical(method) for method in METHODS], [0]):
        name = {"base": "adam", "equal-cost": f"adam-{job.recipe.epochs}"}.get(job.role, job.recipe.method)
        cells.append(Cell(name.replace("/", "-"), job.recipe, job.name, job.role))
    return tuple(cells)


EXPERIMENTS = (
    Experiment(
        "extra/equal-cost", "All methods at equal cost: CNN-5 on CIFAR-10",
        "No paper has this table.", _cells(), seeds=5, measuring=_LIGHT, shorter=5, share=0.2,
        choices=("Adam 1e-3, batch 100, 20 epochs; and Adam trained as long as each method costs. "
                 "Settings are each paper's or the library's defaults; none was tuned.",),
    ),
    FRONTIER,
    *published.EXPERIMENTS,
)  # fmt: skip
CLAIMS = published.CLAIMS
TRENDS = published.TRENDS
