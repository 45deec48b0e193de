"""Training runs on a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...support.errors import UserError, describe, one_line, require
from ..records import Record, write_record
from .finished import finished_record
from .local import Job, Place, Tell, done_before, news_of, train_jobs


def perform_on_ray(jobs: Sequence[Job], place: Place, address: str, workers: int, tell: Tell) -> list[Record]:
    """Train all jobs on a Ray cluster; without an address, start a local one."""
    ray = require("ray", "ray", "--on ray")
    # Look for finished runs here first: the machines of the cluster may not share our disk.
    records = done_before(jobs, place.folder, tell)
    waiting = [job for job in jobs if job.recipe.key not in records]
    if waiting and not ray.is_initialized():
        options: dict[str, Any] = {"address": address} if address else {"num_cpus": workers, "include_dashboard": False}
        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise UserError(f"Ray cannot be started or reached: {describe(error)}") from None
    place = replace(place, folder=place.folder.resolve())
    gpus = 1 if place.device.startswith("cuda") else 0
    remote: Any = ray.remote(num_cpus=place.threads, num_gpus=gpus)(_train_there)
    going = {remote.remote(job, place): job for job in waiting}
    while going:
        (ready, *_), _ = ray.wait(list(going), num_returns=1)
        job = going.pop(ready)
        try:
            record = ray.get(ready)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(one_line(error.cause)) from None
            raise
        if finished_record(job.recipe, place.folder) is None:
            write_record(record, place.folder)
        records[record["key"]] = record
        tell(news_of(record))
    return [records[job.recipe.key] for job in jobs]


def _train_there(job: Job, place: Place) -> Record:
    return train_jobs([job], place)[0]
