"""Eigenvalues at the ends of the spectrum, each with a bound on its error."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .krylov import Krylov, Ritz, Which, best_first, least_basis
from .progress import Progress

_SURE = 1e-3  # a relative residual above which a Ritz value is too often not the one that is looked for


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues in the order asked for, and how sure each is.

    `residuals` are ‖Au − θu‖: there is certainly an eigenvalue that close. `errors` are 2·residual²/gap where the gap
    to the other eigenvalues is clear, and usually far smaller; the gap is itself estimated.
    """

    values: Tensor
    errors: Tensor
    residuals: Tensor
    converged: Tensor  # one truth value each
    matvecs: int
    seconds: float
    seed: int
    which: str = "top"
    how: str = ""  # how products were computed
    vectors: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)  # one a column

    def __str__(self) -> str:
        shown = [
            f"{value:.6g} ± {error:.1g}{'' if ok else ' (not converged)'}"
            for value, error, ok in zip(
                self.values.tolist(), self.errors.tolist(), self.converged.tolist(), strict=True
            )
        ]
        return ", ".join(shown)


def eigenvalues(
    operator: Any,
    k: int = 1,
    *,
    which: Which = "top",
    rtol: float = 1e-3,
    bound: Literal["residual", "gap"] = "residual",
    max_matvecs: int = 1000,
    block: int = 1,
    start: Tensor | None = None,
    seed: int = 0,
    max_basis: int | None = None,
    checkpoint: Any = None,
    progress: bool | None = None,
) -> Eigenvalues:
    """The k largest (``"top"``), smallest (``"bottom"``) or largest in size (``"magnitude"``) eigenvalues.

    Stops when each has a relative error of at most `rtol`: by the residual bound, which is certain and leaves an
    error that is usually far smaller, or by the gap bound, which takes about a third fewer products. That there is an
    eigenvalue so near does not say that it is the largest: a random start may lie almost across the largest one's
    vector. At a residual of 1e-2 that fools one run in 25 on small nets, at 1e-3 one in 300. So the residual bound
    never stops above 1e-3; the gap bound takes that risk, unless `block` is 2 or more. For more values
    than the block has vectors another random direction is then let in, until the values stay: so repeated eigenvalues
    are found as often as they occur. `operator` may be a `Krylov` run, which is then extended as far as needed.

    >>> A = torch.diag(torch.tensor([-7.0, 1.0, 2.0, 5.0]).double())
    >>> [round(eigenvalues(A, which=end).values.item(), 6) for end in ("top", "bottom", "magnitude")]
    [5.0, -7.0, -7.0]
    """
    if which not in ("top", "bottom", "magnitude"):
        raise ValueError(f'which must be "top", "bottom" or "magnitude", not {which!r}')
    if rtol <= 0:
        raise ValueError(f"rtol must be positive, got {rtol}")
    if isinstance(operator, Krylov):
        run = operator
        run.require_same_weights()
    else:
        options = {"block": block, "start": start, "seed": seed, "max_basis": max_basis, "checkpoint": checkpoint}
        run = Krylov(operator, **options)
    if not 1 <= k <= run.size:
        raise ValueError(f"k must be between 1 and {run.size}, the number of weights, got {k}")
    least = least_basis(k, run.block + (k > run.block))  # one more for the random direction that is let in
    if run.max_basis < min(least, run.size):
        raise ValueError(f"max_basis must be at least {least} for {k} eigenvalues and blocks of {run.block}")
    run.look_for(which, k)
    begun, key = time.monotonic(), f"{which} {k} eigenvalues, {bound} {rtol:g}"
    now = run.notes.setdefault(key, {"verifying": None, "waited": 0, "spent": run.matvecs})  # saved with the run
    spent = now["spent"]
    patience = 2 + math.ceil(math.log10(run.size))  # steps until another random direction shows what it hides
    with Progress(f"{which} {k} eigenvalues", progress) as bar:
        while True:
            if run.dimension >= k:
                ritz = run.ritz()
                chosen = best_first(ritz.values, which)[:k]
                errors = (ritz.gap_bounds if bound == "gap" else ritz.residuals)[chosen]
                strict = rtol if bound == "gap" else min(rtol, _SURE)
                converged = _small_enough(run, ritz, chosen, errors, strict)
                bar(run.matvecs / max_matvecs, f"{int(converged.sum())} of {k} converged")
                if run.complete or run.matvecs - spent >= max_matvecs:
                    break
                verifying = now["verifying"]  # the values before another random direction was let in
                looked = verifying is None or (now["waited"] >= patience and not _threatened(ritz, chosen, which))
                if converged.all() and looked:
                    values = ritz.values[chosen]
                    unchanged = verifying is not None and torch.allclose(values, verifying, rtol=rtol, atol=0)
                    if k <= run.block or unchanged:
                        break
                    now["verifying"], now["waited"] = values, 0
                    run.inject()
            now["waited"] += 1
            run.step()
    run.notes.pop(key)
    run.save()
    return Eigenvalues(
        values=ritz.values[chosen], errors=ritz.gap_bounds[chosen], residuals=ritz.residuals[chosen],
        converged=converged | run.complete, matvecs=run.matvecs - spent, seconds=time.monotonic() - begun,
        seed=run.seed, which=which, how=getattr(run.operator, "how", ""),
        vectors=run.vectors(ritz.coordinates[:, chosen]),
    )  # fmt: skip


def _small_enough(run: Krylov, ritz: Ritz, chosen: Tensor, errors: Tensor, rtol: float) -> Tensor:
    """Which of the chosen are accurate enough. An eigenvalue of zero is held to the scale of the largest."""
    floor = torch.finfo(run.dtype).eps * 100 * ritz.values.abs().max()
    enough = errors <= rtol * torch.maximum(ritz.values[chosen].abs(), floor)
    # In the first steps a Ritz value can sit still between two eigenvalues that it cannot tell apart yet.
    return enough & (run.dimension >= min(len(chosen) + 2 * run.block + 1, run.size))


def _threatened(ritz: Ritz, chosen: Tensor, which: Which) -> bool:
    """Whether a Ritz value outside the chosen could still grow into one of them."""
    sizes = ritz.values.abs() if which == "magnitude" else ritz.values if which == "top" else -ritz.values
    others = torch.ones(len(sizes), dtype=torch.bool)
    others[chosen] = False
    return bool((sizes[others] + ritz.residuals[others] > sizes[chosen].min()).any())
