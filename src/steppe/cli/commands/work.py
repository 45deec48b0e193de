"""`steppe work`: train the queued runs of a folder that several processes and machines share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...support.devices import best_device, require_device
from ...support.errors import UserError
from ..errors import resumable
from ..options import DEVICE, THREADS


def command(
    folder: Annotated[Path, typer.Argument(help="Folder with queued runs: --out of a command with --on queue.")],
    device: Annotated[str, typer.Option(help=DEVICE)] = "auto",
    threads: Annotated[int, typer.Option(help=THREADS)] = 1,
    wait: Annotated[
        bool, typer.Option(help="Wait until all runs are done, and take over runs whose process has died.")
    ] = False,
    stale: Annotated[
        float, typer.Option(help="Seconds after which another process that does not report counts as dead.")
    ] = 60.0,
) -> None:
    """Train the queued runs of a folder. Start it in every job of a SLURM array, or on every machine.

    Each process takes a run that no other has taken. A run whose process was killed is taken over and resumes from its
    checkpoint.
    """
    from ...lab.runner.shared_folder import counts, work

    if not folder.is_dir():
        raise UserError(f"folder {folder} does not exist")
    if threads < 1 or stale <= 0:
        raise UserError("--threads must be at least 1, and --stale above 0")
    if not counts(folder):
        raise UserError(f"no queued runs in {folder}: add some with steppe compare ... --on queue --out {folder}")
    device = best_device() if device == "auto" else device
    require_device(device)
    with resumable():
        done = work(folder, device, threads, _tell, wait=wait, stale=stale)
    left = counts(folder)
    waiting, running = left.get("waiting", 0), left.get("running", 0)
    others = f"; {waiting + running} are being trained by others" if waiting + running else ""
    typer.echo(f"trained {len(done)} runs here{others}")
    if not waiting + running:
        typer.echo(f"all are done: steppe report {folder}")


def _tell(news: object) -> None:
    ended, key, result = (getattr(news, name) for name in ("ended", "key", "result"))
    if ended:
        typer.echo(f"{key}: {result}", err=True)
