"""`steppe train`: one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ..errors import resumable, say
from ..options import PLACE, RECIPE, Method, Out, Seed, takes
from ..prepare import make_place, make_recipe


@takes(recipe=RECIPE, place=PLACE)
def command(
    recipe: Any,
    place: Any,
    method: Method = "plain",
    seed: Seed = 0,
    distributed: Annotated[
        str, typer.Option(help="Train on several processes, started by torchrun: ddp or fsdp2.")
    ] = "",
    out: Out = Path("runs"),
) -> None:
    """Train one model with one method and one seed; with torchrun, on several processes."""
    from ...lab.records import with_average
    from ...lab.runner import comparison
    from ...lab.runner.jobs import Job
    from ...lab.runner.local import notes, train_jobs
    from ...lab.training.ranks import ALONE, join
    from ..progress import Display

    asked = make_recipe(recipe, place["compile"])
    one = replace(comparison.with_method(asked, method), seed=seed)
    ranks = join(distributed, place["device"]) if distributed else ALONE
    job = Job(one, "base" if one.method == "plain" else "method")
    where = make_place(place, one, out, compared=False)
    for note in [*comparison.notes(asked, [job]), *notes([job], where)] if ranks.first else ():
        say(note)
    with resumable(), Display([job], quiet=not ranks.first) as display:
        record = train_jobs([job], where, display, ranks)[0]
    if ranks.first:
        end = record["final"]
        assert end is not None  # the run has ended
        result = record["verdict"] or f"{_result(record)}, loss {end['test_loss']:.4f}"
        typer.echo(f"{record['label']}: {result}, {end['seconds']:.1f} s, {end['gradients']} gradients")
        for averaged in with_average(record)[1:]:
            typer.echo(f"{averaged['label']}: {_result(averaged)}, loss {averaged['final']['test_loss']:.4f}")
        typer.echo(f"{'already done:' if display.before else 'wrote'} {out / (record['key'] + '.json')}")
    if distributed:
        _leave_group()


def _result(record: Any) -> str:
    from ...lab.records import metric_of, value_of

    metric = metric_of([record])
    value = value_of(record, metric)
    return f"{metric.replace('_', ' ').strip('↑')} {'is not finite' if value is None else format(value, '.4f')}"


def _leave_group() -> NoReturn:
    """Leave the process group and end the process.

    Models, meshes and caches of torch keep threads of gloo alive, and one that frees a tensor while Python shuts down
    aborts the process. So the process ends without that, after what was registered with atexit has run.
    """
    import atexit
    import gc
    import os
    import sys

    import torch.distributed

    gc.collect()  # objects that hold the group, such as DDP's reducer, must be freed before it
    torch.distributed.barrier()  # no process leaves while others still communicate
    torch.distributed.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
