"""`steppe paper show`: our numbers beside a paper's."""

from __future__ import annotations

from typing import Annotated

import typer

from ...paper_options import Kept, Name, kept_results


def command(
    name: Name,
    results: Kept = None,
    scale: Annotated[str | None, typer.Option(help="Only runs of this scale.")] = None,
) -> None:
    """Show our numbers beside the paper's: difference in combined standard errors, verdict."""
    from ....papers import find
    from ....papers.experiment import check_scale
    from ....papers.show import print_experiment

    experiment = find(name)
    print_experiment(experiment, kept_results(results), check_scale(scale) if scale else None)
