"""`steppe paper show`: our numbers beside a paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...paper_options import Kept, Name, kept_results


def command(
    name: Name,
    results: Kept = None,
    scale: Annotated[str | None, typer.Option(help="Only runs of this scale: full, small or smoke.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder to search for finished runs that are not collected yet.")] = Path(
        "runs"
    ),
) -> None:
    """Show our numbers beside the paper's, with the difference in combined standard errors and a verdict.

    Finished runs that are not collected yet are included and marked.
    """
    from ....papers.experiment import check_scale
    from ....papers.registry import find
    from ....papers.show import print_experiment

    experiment = find(name)
    found = kept_results(results).with_uncollected(runs)
    print_experiment(experiment, found, check_scale(scale) if scale else None)
