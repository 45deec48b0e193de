"""Training runs on a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...support.errors import UserError, describe, one_line, require
from ...support.own_objects import packed, unpack
from ..records import Record, write_record
from .finished import finished_record
from .jobs import Job, Place
from .local import Tell, done_before, news_of, train_jobs

_PATIENCE = 10.0  # seconds to wait for a run, or for an answer of the head node, before the next check
_FAILURES = 3  # after this many failed checks in a row the head node counts as dead; it may have been restarted


def perform_on_ray(jobs: Sequence[Job], place: Place, address: str, workers: int, tell: Tell) -> list[Record]:
    """Train all jobs on a Ray cluster; without an address, start a local one."""
    ray = require("ray", "ray", "--on ray")
    # Look for finished runs here first: the nodes of the cluster may not share our disk.
    records = done_before(jobs, place.folder, tell)
    waiting = [job for job in jobs if job.recipe.key not in records]
    if waiting:
        _connect(ray, address, workers)
    place = replace(place, folder=place.folder.resolve())
    gpus = 1 if place.device.startswith("cuda") else 0
    remote: Any = ray.remote(num_cpus=place.threads, num_gpus=gpus)(_train_on_node)
    try:
        own = ray.put(packed("--on ray")) if waiting else None
        going = {remote.remote(job, place, os.getcwd(), own): job for job in waiting}
        while going:
            ready = next_run(ray, list(going))
            job = going.pop(ready)
            record = ray.get(ready)
            if finished_record(job.recipe, place.folder) is None:
                write_record(record, place.folder)
            records[record["key"]] = record
            tell(news_of(record))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(one_line(error.cause)) from None
        raise
    except (ray.exceptions.RayError, ConnectionError) as error:
        reason = describe(error).partition(". ")[0][:200]
        raise UserError(
            f"the Ray cluster failed ({reason}); nothing is lost: run the same command again to resume"
        ) from None
    return [records[job.recipe.key] for job in jobs]


def next_run(ray: Any, going: list[Any]) -> Any:
    """The next run that ends.

    It checks that the head node answers: without it, Ray would wait for a minute and then end this process silently.
    """
    failures = 0
    while True:
        done, _ = ray.wait(going, num_returns=1, timeout=_PATIENCE)
        if done:
            return done[0]
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
            failures = 0
        except OSError as error:
            failures += 1
            if failures == _FAILURES:
                raise ConnectionError(f"its head {host}:{port} does not answer: {describe(error)}") from None


def _connect(ray: Any, address: str, workers: int) -> None:
    """Connect to the cluster, unless this program is connected already."""
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"address": address} if address else {"num_cpus": workers, "include_dashboard": False}
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise UserError(f"Ray cannot be started or reached: {describe(error)}") from None


def _train_on_node(job: Job, place: Place, folder: str, own: bytes | None) -> Record:
    if folder not in sys.path:
        sys.path.insert(0, folder)  # to find the user's modules, as in the folder where the command was started
    unpack(own)
    return train_jobs([job], place)[0]
