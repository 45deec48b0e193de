"""One Krylov run, from which eigenvalues, density, trace, Frobenius norm and log-determinant all follow.

Block Lanczos with full reorthogonalisation: an orthonormal basis Q of span{Z, AZ, A²Z, …} and A's projection
T = QᵀAQ. Every new block is orthogonalised twice against the whole basis, so there are no ghosts: each Ritz value
appears as often as it should. A run can be extended, restarted on its best vectors when memory is short, saved
and resumed.

>>> A = torch.diag(torch.tensor([5.0, 1.0, 0.5, 0.1]).double())
>>> run = Krylov(A)
>>> run.extend(4)
>>> run.ritz().values
tensor([5.0000, 1.0000, 0.5000, 0.1000], dtype=torch.float64)
"""

from __future__ import annotations

import math
import os
import time
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .checkpoints import Checkpoint, mark_of

Which: TypeAlias = Literal["top", "bottom", "magnitude"]
_BESIDES = 2  # Ritz vectors that a restart keeps besides the wanted ones: those next to them decide how fast it goes


def best_first(values: Tensor, which: Which) -> Tensor:
    """Indices that sort values: the largest first, the smallest, or the largest in size."""
    if which == "magnitude":
        return values.abs().argsort(descending=True)
    return values.argsort(descending=which == "top")


def least_basis(count: int, block: int) -> int:
    """How many basis vectors it takes to find eigenvalues with restarts: room for two blocks beside what is kept."""
    return count + _BESIDES + 2 * block


def random_signs(count: int, size: int, generator: torch.Generator, like: Any) -> Tensor:
    """Rademacher vectors, one a row. Drawn on the CPU, 64 signs a number: the same on every device and every rank."""
    words = torch.empty(count, -(-size // 64), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    octets = words.view(torch.uint8).to(like.device)
    bits = octets.unsqueeze(-1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=octets.device)) & 1
    return bits.flatten(1)[:, :size].to(like.dtype).mul_(2).sub_(1)


class Ritz(NamedTuple):
    """Approximate eigenpairs, the largest first."""

    values: Tensor
    residuals: Tensor  # ‖Au − θu‖: there is an eigenvalue within this distance
    gap_bounds: Tensor  # 2·residual²/gap where the gap to the other Ritz values is safe, else the residual
    coordinates: Tensor  # of the vectors, in the basis: column j belongs to value j


class Krylov:
    """A block Lanczos run on an operator. It belongs to the weights that it began with: others need a run of their own.

    Args:
        operator: Anything symmetric with `shape` and `@` (on n by k tensors).
        block: How many start vectors. Each is a random probe for the density and its functions; one is the
            fastest for a single eigenvalue.
        start: The first block (n by block) when it should not be random: a warm start.
        seed: Of the start block and of all later random vectors.
        max_basis: How many basis vectors are kept. When they are used up the run restarts on the best ones: the
            largest in size, or those that `look_for` names.
        checkpoint: A file to save the run to, about once a minute and when it has come as far as was asked. If it
            exists the run resumes from it.
    """

    def __init__(
        self,
        operator: Any,
        *,
        block: int = 1,
        start: Tensor | None = None,
        seed: int = 0,
        max_basis: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ):
        self.operator = operator
        self.size = int(operator.shape[0])
        if tuple(operator.shape) != (self.size, self.size) or self.size == 0:
            raise ValueError(f"the operator must be square and not empty, its shape is {tuple(operator.shape)}")
        if block < 1:
            raise ValueError(f"block must be at least 1, got {block}")
        self.block, self.seed = min(block, self.size), seed
        self.max_basis = min(max_basis or self.size, self.size)
        if self.max_basis < min(2 * self.block + 2, self.size):
            raise ValueError(f"max_basis must be at least {2 * self.block + 2} for blocks of {self.block}")
        self._generator = torch.Generator().manual_seed(seed)
        self.matvecs, self.seconds, self.restarts = 0, 0.0, 0
        self._wanted: tuple[Which, int] = ("magnitude", 0)  # what a restart must keep
        if start is None:
            start = random_signs(self.block, self.size, self._generator, self).T
        if start.shape[0] != self.size:
            raise ValueError(f"the start block must have {self.size} rows, got {tuple(start.shape)}")
        self.start = start.reshape(self.size, -1).to(self.device, self.dtype)
        self._rows = torch.empty(0, self.size, device=self.device, dtype=self.dtype)
        self._used = 0
        self.projection = torch.empty(0, 0, dtype=torch.float64)
        self._next, corner = _orthonormal(self.start.T.contiguous(), float(self.start.norm(dim=0).max()))
        self.corner = corner.double().cpu()  # start = Q₁ · corner: how the probes lie in the first block
        self.coupling = torch.zeros(len(self._next), 0, dtype=torch.float64)  # AQ = QT + next·coupling
        self.notes: dict[str, Any] = {}  # where the measures that use this run have come to: saved with it
        self.saves_itself = True  # now and then, after a step
        self._marks = self._marks_now()
        self._checkpoint = Checkpoint(checkpoint, self._identity)
        if state := self._checkpoint.load():
            self.load_state_dict(state)

    @property
    def dtype(self) -> torch.dtype:
        """Of the basis."""
        return self.operator.dtype

    @property
    def device(self) -> torch.device:
        """Where the basis lives."""
        return self.operator.device

    @property
    def basis(self) -> Tensor:
        """The orthonormal basis, one vector a row."""
        return self._rows[: self._used]

    @property
    def dimension(self) -> int:
        """How many vectors are in the basis."""
        return self._used

    @property
    def complete(self) -> bool:
        """Whether the basis spans everything: all results are then exact."""
        return self._used == self.size

    @property
    def full(self) -> bool:
        """Whether there is no room for another block: the next step restarts."""
        return self._used > 0 and self._used + len(self._next) > self.max_basis and self.max_basis < self.size

    def require_same_weights(self) -> None:
        """Refuse to go on where the model was trained on: the basis belongs to other weights."""
        if self._marks_now() != self._marks:
            raise ValueError("the weights have changed since this Krylov run began: make a new run for the new ones")

    def _marks_now(self) -> list[float] | None:
        objective = getattr(self.operator, "objective", None)
        return None if objective is None else objective.marks()

    def extend(self, dimension: int) -> None:
        """Grow the basis to a dimension (or to the whole space), as far as it can without a restart."""
        self.require_same_weights()
        while self._used < min(dimension, self.size) and not self.full:
            self.step()
        self.save()

    def step(self) -> None:
        """Add one block: as many products as the block has vectors."""
        begun = time.monotonic()
        if self.full:
            self._restart()
        if len(self._next) == 0:  # the space is closed under A: go on from somewhere else, if there is anything left
            count = min(self.block, self.size - self._used)
            fresh = torch.randn(count, self.size, generator=self._generator).to(self.device, self.dtype)
            self._orthogonalise(fresh)
            self._next, _ = _orthonormal(fresh, self.size**0.5)
            self.coupling = torch.zeros(len(self._next), self._used, dtype=torch.float64)
            if len(self._next) == 0:
                raise RuntimeError("no direction is left outside the Krylov space")
        q = self._next
        product = (self.operator @ q.T).T.contiguous()
        self.matvecs += len(q)
        scale = float(product.norm(dim=1).max())
        if not math.isfinite(scale):
            raise ValueError("the operator returned a product that is not finite")
        self._append(q)
        # All coefficients, not only the last two blocks': right after a restart too, and what is computed is used.
        coefficients = self._orthogonalise(product).double().cpu()
        old, new = self._used - len(q), self._used
        grown = torch.zeros(new, new, dtype=torch.float64)
        grown[:old, :old] = self.projection
        grown[:, old:] = coefficients
        grown[old:, :] = coefficients.T
        corner = coefficients[old:]
        grown[old:, old:] = (corner + corner.T) / 2
        self.projection = grown
        room = self.size - self._used
        self._next, triangle = _orthonormal(product, scale) if room else (product[:0], product.new_zeros(0, len(q)))
        self._next, triangle = self._next[:room], triangle[:room]
        # Small rests are mostly rounding: clean again.
        if len(triangle) and float(triangle.norm(dim=1).min()) < 1e-3 * scale:
            self._orthogonalise(self._next)
            q_again, r_again = torch.linalg.qr(self._next.T)
            self._next = (q_again * r_again.diagonal().sign()).T.contiguous()  # signs as in the coefficients
        self.coupling = torch.zeros(len(self._next), new, dtype=torch.float64)
        self.coupling[:, old:] = triangle.double().cpu()
        self.seconds += time.monotonic() - begun
        if self.saves_itself:
            self.save_now_and_then()

    def look_for(self, which: Which, count: int) -> None:
        """Say which eigenvalues restarts are to keep from now on."""
        before, kept = self._wanted
        self._wanted = which, count
        if self.restarts and (which != before or count > kept):  # restarts have filtered these out of the next block
            self.inject()

    def inject(self) -> None:
        """Let one more random direction into the next block: it finds eigenvectors that the others cannot see.

        A run from b vectors finds at most b copies of a repeated eigenvalue, and misses an eigenvector to which
        its start is orthogonal. Nothing happens where a larger block would leave too little of `max_basis`.
        """
        if self.max_basis < min(least_basis(self._wanted[1], len(self._next) + 1), self.size):
            return
        fresh = torch.randn(1, self.size, generator=self._generator).to(self.device, self.dtype)
        for _ in range(2):
            self._orthogonalise(fresh)
            fresh -= (fresh @ self._next.T) @ self._next
        fresh, _ = _orthonormal(fresh, self.size**0.5)
        if self._used + len(self._next) + len(fresh) > self.size:
            return
        self._next = torch.cat([self._next, fresh])
        self.coupling = torch.cat([self.coupling, torch.zeros(len(fresh), self._used, dtype=torch.float64)])

    def ritz(self) -> Ritz:
        """Ritz values, with bounds on their distance from an eigenvalue."""
        values, vectors = torch.linalg.eigh(self.projection)
        values, vectors = values.flip(0), vectors.flip(1)
        rounding = torch.finfo(self.dtype).eps * values.abs().max()
        residuals = torch.linalg.vector_norm(self.coupling @ vectors, dim=0) + rounding
        # Distance to the nearest other Ritz value, less that one's own uncertainty.
        gaps = (values.unsqueeze(1) - values.unsqueeze(0)).abs() - residuals.unsqueeze(0)
        gaps.fill_diagonal_(torch.inf)
        gap = gaps.min(dim=1).values if len(values) > 1 else torch.zeros(1, dtype=torch.float64)
        # The gap is an estimate: the eigenvalue next to this one may not have been found. Hence the 2.
        bounds = torch.where(gap > 2 * residuals, 2 * residuals.square() / gap, residuals).clamp_min(float(rounding))
        return Ritz(values, residuals, bounds, vectors)

    def vectors(self, coordinates: Tensor) -> Tensor:
        """Vectors from their coordinates in the basis, one a column."""
        return self.basis.T @ coordinates.to(self.basis)

    # Inside

    def _append(self, rows: Tensor) -> None:
        needed = self._used + len(rows)
        if needed > len(self._rows):  # grow by half: appending stays cheap and no more than that is wasted
            capacity = min(max(needed, len(self._rows) * 3 // 2, 16), max(self.max_basis, needed))
            larger = torch.empty(capacity, self.size, device=self.device, dtype=self.dtype)
            larger[: self._used] = self.basis
            self._rows = larger
        self._rows[self._used : needed] = rows
        self._used = needed

    def _orthogonalise(self, rows: Tensor) -> Tensor:
        """Take the basis out of some vectors, in place and twice; returns the coefficients."""
        total = torch.zeros(self._used, len(rows), device=self.device, dtype=self.dtype)
        for _ in range(2):
            coefficients = self.basis @ rows.T
            rows -= coefficients.T @ self.basis
            total += coefficients
        return total

    def _restart(self) -> None:
        """Keep the wanted Ritz vectors and the next block, forget the rest (thick restart)."""
        values, _, _, coordinates = self.ritz()
        which, count = self._wanted
        room = self.max_basis - len(self._next)
        keep = max(min(self.max_basis // 2, room - len(self._next)), count + _BESIDES)
        chosen = best_first(values, which)[: min(keep, room)]
        coordinates = coordinates[:, chosen]
        self._rows[: len(chosen)] = coordinates.T.to(self.basis) @ self.basis
        self._used = len(chosen)
        self.projection = torch.diag(values[chosen])
        self.coupling = self.coupling @ coordinates
        self.corner = self.corner[:0]  # the start block is no longer in the basis
        self.restarts += 1

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on."""
        return {
            "basis": self.basis.cpu(), "next": self._next.cpu(), "projection": self.projection,
            "coupling": self.coupling, "corner": self.corner, "start": self.start.cpu(),
            "generator": self._generator.get_state(), "matvecs": self.matvecs, "seconds": self.seconds,
            "restarts": self.restarts, "wanted": self._wanted, "notes": self.notes,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where a run on the same operator was saved."""
        self._used = 0
        self._append(state["basis"].to(self.device, self.dtype))
        self._next = state["next"].to(self.device, self.dtype)
        self.start = state["start"].to(self.device, self.dtype)
        self.projection, self.coupling, self.corner = state["projection"], state["coupling"], state["corner"]
        self._generator.set_state(state["generator"])
        self.matvecs, self.seconds, self.restarts = state["matvecs"], state["seconds"], state["restarts"]
        self.notes, self._wanted = state["notes"], state.get("wanted", self._wanted)

    def _identity(self) -> dict[str, Any]:
        limits = {"block": self.block, "max_basis": self.max_basis}
        return {"size": self.size, "seed": self.seed, "operator": mark_of(self.operator), **limits}

    def save(self) -> None:
        """Save the run to its checkpoint, if it has one."""
        self._checkpoint.save(self.state_dict, now=True)

    def save_now_and_then(self) -> None:
        """Save the run if the last time is about a minute ago."""
        self._checkpoint.save(self.state_dict)


def _orthonormal(rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Orthonormal rows and a matrix C with Cᵀ·orthonormal = rows; directions that are rounding errors are dropped."""
    least = torch.finfo(rows.dtype).eps * 50 * scale
    if len(rows) == 1:  # as below, without the solvers' start-up time
        length = rows.norm()
        return (rows / length, length.reshape(1, 1)) if float(length) > least else (rows[:0], rows.new_zeros(0, 1))
    q, r = torch.linalg.qr(rows.T)
    left, sizes, right = torch.linalg.svd(r.cpu())  # small: faster there than on a GPU
    kept = sizes > least
    return (q @ left[:, kept].to(q)).T.contiguous(), (sizes.unsqueeze(1) * right)[kept]
