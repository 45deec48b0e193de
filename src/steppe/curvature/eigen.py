"""Eigenvalues at the ends of the spectrum, each with a bound on its error."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from .krylov import Krylov, Ritz, Which, best_first, least_basis
from .progress import Progress

Bound: TypeAlias = Literal["residual", "gap"]
_LARGEST_RESIDUAL = 1e-3  # relative; above it, a Ritz value too often belongs to another eigenvalue


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues in the requested order, with their uncertainties.

    `residuals` are ‖Au − θu‖ plus an estimate of the error of the products: there is an eigenvalue within this
    distance. `errors` are 2·residual²/gap, at least that error, if the gap to the other eigenvalues is clear, and
    usually far smaller than the residuals; the gap itself is estimated.
    """

    values: Tensor
    errors: Tensor
    residuals: Tensor
    converged: Tensor  # one bool per eigenvalue
    matvecs: int
    seconds: float
    seed: int
    which: str = "top"
    how: str = ""  # how products were computed
    vectors: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)  # one per column

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
    bound: Bound = "residual",
    max_matvecs: int = 1000,
    block: int = 1,
    start: Tensor | None = None,
    seed: int = 0,
    max_basis: int | None = None,
    checkpoint: Any = None,
    progress: bool | None = None,
) -> Eigenvalues:
    """The k largest (``"top"``), smallest (``"bottom"``) or largest in absolute value (``"magnitude"``) eigenvalues.

    Stops when each has a relative error of at most `rtol`: by the residual bound, which is certain and usually far
    larger than the error, or by the gap bound, which needs about a third fewer products. A small residual shows that
    an eigenvalue is near, not that it is the largest: a random start may be almost orthogonal to the top eigenvector.
    On small nets this happens in one run of 25 at a residual of 1e-2, and in one of 300 at 1e-3. So the residual bound
    never stops above 1e-3. The gap bound takes that risk, unless `block` is 2 or more. If k is larger than the block,
    random directions are added, one at a time, until the values do not change: so repeated eigenvalues are found with
    their multiplicity. `operator` may be a `Krylov` run, which is then extended as far as needed.
    `max_matvecs` is exceeded only if it is too small for k basis vectors.

    >>> A = torch.diag(torch.tensor([-7.0, 1.0, 2.0, 5.0]).double())
    >>> [round(eigenvalues(A, which=end).values.item(), 6) for end in ("top", "bottom", "magnitude")]
    [5.0, -7.0, -7.0]
    """
    options = {"block": block, "start": start, "seed": seed, "max_basis": max_basis, "checkpoint": checkpoint}
    run = operator if isinstance(operator, Krylov) else Krylov(operator, **options)
    _require_possible(run, k, rtol, which)
    run.look_for(which, k)
    begun, title = time.monotonic(), f"{which} {k} eigenvalues"
    key = f"{title}, {bound} {rtol:g}"
    now = run.notes.setdefault(key, {"verifying": None, "waited": 0, "spent": run.matvecs})  # saved with the run
    spent = now["spent"]
    with Progress(title, progress) as bar:
        while True:
            if run.dimension >= k:
                ritz = run.ritz()
                chosen = best_first(ritz.values, which)[:k]
                converged = _small_enough(run, ritz, chosen, bound, rtol)
                bar(run.matvecs / max_matvecs, f"{int(converged.sum())} of {k} converged")
                following = len(run.next_block) or run.block
                exhausted = run.complete or run.matvecs - spent + following > max_matvecs
                enough = bool(converged.all()) or _at_the_limit(run, ritz, chosen)
                if exhausted or (enough and _verified(run, now, ritz, chosen, which, rtol)):
                    break
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


def _require_possible(run: Krylov, k: int, rtol: float, which: str) -> None:
    if which not in ("top", "bottom", "magnitude"):
        raise ValueError(f'which must be "top", "bottom" or "magnitude", not {which!r}')
    if rtol <= 0:
        raise ValueError(f"rtol must be positive, got {rtol}")
    run.require_same_weights()
    if not 1 <= k <= run.size:
        raise ValueError(f"k must be between 1 and {run.size}, the number of weights, got {k}")
    least = least_basis(k, run.block + (k > run.block))  # one more for the random direction that is added
    if run.max_basis < min(least, run.size):
        raise ValueError(f"max_basis must be at least {least} for {k} eigenvalues and blocks of {run.block}")


def _verified(run: Krylov, now: dict[str, Any], ritz: Ritz, chosen: Tensor, which: Which, rtol: float) -> bool:
    """Whether converged values are final. If not, add a random direction, or wait for what the last one finds."""
    before = now["verifying"]  # the values before the last random direction was added
    patience = 2 + math.ceil(math.log10(run.size))  # steps until a random direction shows an eigenvector it contains
    if before is not None and (now["waited"] < patience or _may_be_displaced(ritz, chosen, which)):
        return False
    values = ritz.values[chosen]
    noise = run.accuracy * float(ritz.values.abs().max()) if _at_the_limit(run, ritz, chosen) else 0.0
    unchanged = before is not None and torch.allclose(values, before, rtol=rtol, atol=noise)
    if len(chosen) <= run.block or unchanged:
        return True
    now["verifying"], now["waited"] = values, 0
    run.inject()
    return False


def _small_enough(run: Krylov, ritz: Ritz, chosen: Tensor, bound: Bound, rtol: float) -> Tensor:
    """Which of the chosen values are accurate enough. For an eigenvalue of zero, relative to the largest one."""
    errors = (ritz.gap_bounds if bound == "gap" else ritz.residuals)[chosen]
    rtol = rtol if bound == "gap" else min(rtol, _LARGEST_RESIDUAL)
    floor = torch.finfo(run.dtype).eps * 100 * ritz.values.abs().max()
    enough = errors <= rtol * torch.maximum(ritz.values[chosen].abs(), floor)
    # In the first steps a Ritz value can be stationary between two eigenvalues that are not yet resolved.
    return enough & (run.dimension >= min(len(chosen) + 2 * run.block + 1, run.size))


def _at_the_limit(run: Krylov, ritz: Ritz, chosen: Tensor) -> bool:
    """Whether the residuals are mostly the error of the products, which more products do not reduce."""
    if not hasattr(run.operator, "objective"):  # a matrix is as accurate as its numbers
        return False
    enough = run.dimension >= min(len(chosen) + 2 * run.block + 1, run.size)
    return enough and bool((ritz.residuals[chosen] <= 1.5 * run.accuracy * ritz.values.abs().max()).all())


def _may_be_displaced(ritz: Ritz, chosen: Tensor, which: Which) -> bool:
    """Whether a Ritz value outside the chosen ones could still become one of them."""
    sizes = ritz.values.abs() if which == "magnitude" else ritz.values if which == "top" else -ritz.values
    others = torch.ones(len(sizes), dtype=torch.bool)
    others[chosen] = False
    return bool((sizes[others] + ritz.residuals[others] > sizes[chosen].min()).any())
