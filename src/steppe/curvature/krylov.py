"""Block Lanczos: one Krylov run gives eigenvalues, density, trace, Frobenius norm and log-determinant.

The run builds an orthonormal basis Q of span{Z, AZ, A²Z, …} and A's projection T = QᵀAQ. Every new block is
orthogonalised twice against the whole basis, so there are no spurious copies of Ritz values. A run can be extended,
restarted on its best vectors when memory is short, saved and resumed.

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

from .checkpoints import Checkpoint, digest, fingerprint
from .random_rows import signs

Which: TypeAlias = Literal["top", "bottom", "magnitude"]
_EXTRA = 2  # Ritz vectors that a restart keeps besides the wanted ones: the nearest ones determine the convergence


def best_first(values: Tensor, which: Which) -> Tensor:
    """Indices that sort values: the largest first, the smallest first, or the largest in absolute value first."""
    if which == "magnitude":
        return values.abs().argsort(descending=True)
    return values.argsort(descending=which == "top")


def least_basis(count: int, block: int) -> int:
    """The smallest basis that finds eigenvalues with restarts: the vectors that are kept, and two blocks."""
    return count + _EXTRA + 2 * block


def nearest_gaps(values: Tensor, residuals: Tensor) -> Tensor:
    """The distance of each Ritz value to the nearest other one, minus that one's residual; 0 for a single value."""
    if len(values) == 1:
        return torch.zeros(1, dtype=values.dtype)
    gaps = (values.unsqueeze(1) - values.unsqueeze(0)).abs() - residuals.unsqueeze(0)
    gaps.fill_diagonal_(torch.inf)
    return gaps.min(dim=1).values


class Ritz(NamedTuple):
    """Approximate eigenpairs, the largest first."""

    values: Tensor
    residuals: Tensor  # ‖Au − θu‖, and the error of the products: there is an eigenvalue within this distance
    gap_bounds: Tensor  # 2·residual²/gap if the gap to the other Ritz values is clear, else the residual
    coordinates: Tensor  # of the Ritz vectors in the basis: column j belongs to value j


class Krylov:
    """A block Lanczos run on an operator. It is valid for the weights that it began with; other weights need a new run.

    Args:
        operator: Any symmetric operator with `shape` and `@` (on n by k tensors).
        block: How many start vectors. Each is a random probe for the density and its functions; one is the
            fastest for a single eigenvalue.
        start: The first block (n by block), for a warm start. Default: random signs.
        seed: Of the start block and of all later random vectors.
        max_basis: The most basis vectors that are kept. When the basis is full, the run restarts on the best ones:
            the largest in absolute value, or those that `look_for` names.
        checkpoint: A file to which the run is saved, about once a minute and when a request is finished. If the file
            exists, the run resumes from it.
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
        # Here, because a loaded state replaces the start.
        self._given_start = None if start is None or checkpoint is None else digest(start)
        if start is None:
            start = signs(self.block, self.size, self._generator, self).T
        if start.shape[0] != self.size:
            raise ValueError(f"the start block must have {self.size} rows, got {tuple(start.shape)}")
        self.start = start.reshape(self.size, -1).to(self.device, self.dtype)
        self._rows = torch.empty(0, self.size, device=self.device, dtype=self.dtype)
        self._used = 0
        self.projection = torch.empty(0, 0, dtype=torch.float64)
        self._next, corner = _orthonormal(self.start.T.contiguous(), float(self.start.norm(dim=0).max()))
        self.corner = corner.double().cpu()  # start = Q₁ · corner: the probes in the coordinates of the first block
        self.coupling = torch.zeros(len(self._next), 0, dtype=torch.float64)  # AQ = QT + next·coupling
        self.notes: dict[str, Any] = {}  # progress of the measurements that use this run; saved with it
        self.autosave = True  # save after a step if the last save was a while ago
        self._fingerprint = self._weights_fingerprint()
        self._checkpoint = Checkpoint(checkpoint, self._identity)
        if state := self._checkpoint.load():
            self.load_state_dict(state)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the basis."""
        return self.operator.dtype

    @property
    def device(self) -> torch.device:
        """The device of the basis."""
        return self.operator.device

    @property
    def accuracy(self) -> float:
        """The relative error of the operator's products. It may change with the first product, which finds a way."""
        return accuracy_of(self.operator)

    @property
    def basis(self) -> Tensor:
        """The orthonormal basis, one vector per row."""
        return self._rows[: self._used]

    @property
    def next_block(self) -> Tensor:
        """The block that the next step multiplies and appends to the basis, one vector per row."""
        return self._next

    @property
    def dimension(self) -> int:
        """How many vectors are in the basis."""
        return self._used

    @property
    def complete(self) -> bool:
        """Whether the basis spans the whole space: all results are then exact."""
        return self._used == self.size

    @property
    def full(self) -> bool:
        """Whether there is no room for another block, so that the next step restarts."""
        return self._used > 0 and self._used + len(self._next) > self.max_basis and self.max_basis < self.size

    def require_same_weights(self) -> None:
        """Raise if the model's weights have changed since the run began: the basis belongs to the old ones."""
        if self._weights_fingerprint() != self._fingerprint:
            raise ValueError("the weights have changed since this Krylov run began: make a new run for the new ones")

    def _weights_fingerprint(self) -> list[float] | None:
        objective = getattr(self.operator, "objective", None)
        return None if objective is None else objective.fingerprint()

    def extend(self, dimension: int) -> None:
        """Grow the basis to a dimension (at most the whole space), as far as possible without a restart."""
        self.require_same_weights()
        while self._used < min(dimension, self.size) and not self.full:
            self.step()
        self.save()

    def step(self) -> None:
        """Add one block to the basis. It takes as many products as the block has vectors."""
        begun = time.monotonic()
        if self.full:
            self._restart()
        if len(self._next) == 0:  # the basis is invariant under A: continue from a new random block
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
        largest = float(product.abs().max())
        if not math.isfinite(largest):
            raise ValueError("the operator returned a product that is not finite")
        # By a power of two, which rounds nothing: squares of very small or large entries are not representable.
        size = _power_of_two(largest)
        product /= size
        scale = float(product.norm(dim=1).max())
        self._append(q)
        # All coefficients, not only those of the last two blocks: this is also correct right after a restart.
        coefficients = self._orthogonalise(product).double().cpu() * size
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
        # A small remainder is mostly rounding error: orthogonalise it again.
        if len(triangle) and float(triangle.norm(dim=1).min()) < 1e-3 * scale:
            self._orthogonalise(self._next)
            q_again, r_again = torch.linalg.qr(self._next.T)
            self._next = (q_again * r_again.diagonal().sign()).T.contiguous()  # signs as in the coefficients
        self.coupling = torch.zeros(len(self._next), new, dtype=torch.float64)
        self.coupling[:, old:] = triangle.double().cpu() * size
        self.seconds += time.monotonic() - begun
        if self.autosave:
            self.save_if_due()

    def look_for(self, which: Which, count: int) -> None:
        """Set which eigenvalues restarts keep from now on."""
        before, kept = self._wanted
        self._wanted = which, count
        if self.restarts and (which != before or count > kept):  # earlier restarts have filtered them out
            self.inject()

    def inject(self) -> None:
        """Add one more random direction to the next block, to find eigenvectors that the others miss.

        A run from b vectors finds at most b copies of a repeated eigenvalue, and misses an eigenvector that is
        orthogonal to its start block. Nothing is added if `max_basis` has no room for a larger block.
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
        rounding = self.accuracy * values.abs().max()
        residuals = torch.linalg.vector_norm(self.coupling @ vectors, dim=0) + rounding
        gap = nearest_gaps(values, residuals)
        # The factor 2: the gap is an estimate, because the nearest eigenvalue may not have been found.
        bounds = torch.where(gap > 2 * residuals, 2 * residuals.square() / gap, residuals).clamp_min(float(rounding))
        return Ritz(values, residuals, bounds, vectors)

    def vectors(self, coordinates: Tensor) -> Tensor:
        """Vectors from their coordinates in the basis, one per column."""
        return self.basis.T @ coordinates.to(self.basis)

    # Internals

    def _append(self, rows: Tensor) -> None:
        needed = self._used + len(rows)
        if needed > len(self._rows):  # grow by half: appending is cheap, and at most a third of the memory is unused
            capacity = min(max(needed, len(self._rows) * 3 // 2, 16), max(self.max_basis, needed))
            larger = torch.empty(capacity, self.size, device=self.device, dtype=self.dtype)
            larger[: self._used] = self.basis
            self._rows = larger
        self._rows[self._used : needed] = rows
        self._used = needed

    def _orthogonalise(self, rows: Tensor) -> Tensor:
        """Orthogonalise rows against the basis, in place and twice; return the coefficients."""
        total = torch.zeros(self._used, len(rows), device=self.device, dtype=self.dtype)
        for _ in range(2):
            coefficients = self.basis @ rows.T
            rows -= coefficients.T @ self.basis
            total += coefficients
        return total

    def _restart(self) -> None:
        """Keep the wanted Ritz vectors and the next block, and drop the rest (thick restart)."""
        values, _, _, coordinates = self.ritz()
        which, count = self._wanted
        room = self.max_basis - len(self._next)
        keep = max(min(self.max_basis // 2, room - len(self._next)), count + _EXTRA)
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
        """Everything that is needed to resume."""
        return {
            "basis": self.basis.cpu(), "next": self._next.cpu(), "projection": self.projection,
            "coupling": self.coupling, "corner": self.corner, "start": self.start.cpu(),
            "generator": self._generator.get_state(), "matvecs": self.matvecs, "seconds": self.seconds,
            "restarts": self.restarts, "wanted": self._wanted, "notes": self.notes,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the saved state of a run on the same operator."""
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
        return {
            "size": self.size,
            "seed": self.seed,
            "operator": fingerprint(self.operator),
            **limits,
            "start": self._given_start,
        }

    def save(self) -> None:
        """Save the run to its checkpoint, if it has one."""
        self._checkpoint.save(self.state_dict, now=True)

    def save_if_due(self) -> None:
        """Save the run if the last save was about a minute ago."""
        self._checkpoint.save(self.state_dict)


def accuracy_of(operator: Any) -> float:
    """The relative error of an operator's products, as far as it says how it computes them."""
    while not hasattr(operator, "way") and hasattr(operator, "operator"):
        operator = operator.operator  # a scaled one
    eps = torch.finfo(operator.dtype).eps
    if getattr(operator, "way", None) == "difference":
        return 1e-4 if operator.dtype == torch.float32 else 2e-7
    return 20 * eps if hasattr(operator, "way") else eps


def _power_of_two(number: float) -> float:
    """A power of two near a number, representable in float32 with its inverse; 1 for zero."""
    return 2.0 ** min(max(math.frexp(number)[1], -120), 120) if number else 1.0


def _orthonormal(rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Orthonormal rows and a matrix C with Cᵀ·orthonormal = rows. Directions that are rounding errors are dropped."""
    least = torch.finfo(rows.dtype).eps * 50 * scale
    if len(rows) == 1:  # the same result as below, without the overhead of the solvers
        length = rows.norm()
        return (rows / length, length.reshape(1, 1)) if float(length) > least else (rows[:0], rows.new_zeros(0, 1))
    q, r = torch.linalg.qr(rows.T)
    left, sizes, right = torch.linalg.svd(r.cpu())  # a small matrix: faster on the CPU than on a GPU
    kept = sizes > least
    return (q @ left[:, kept].to(q)).T.contiguous(), (sizes.unsqueeze(1) * right)[kept]
