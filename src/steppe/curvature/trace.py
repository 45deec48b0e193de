"""Trace and Frobenius norm of a matrix from its products, with t intervals.

For any orthonormal Q that is independent of the random signs z, with P = I − QQᵀ,

    tr A  = tr QᵀAQ + E[(Pz)ᵀA(Pz)],        ‖A‖²_F = ‖AQ‖²_F + E‖A(Pz)‖².

The methods differ in Q: nothing (``"hutchinson"``, Hutchinson 1989), the range of A on random vectors (``"hutch++"``,
Meyer et al. 2021), a Krylov space (``"krylov"``, after Chen & Hallman 2023), or each probe's own leave-one-out
basis (``"xtrace"``, Epperly, Tropp & Webber 2024). After training, a few directions carry most of the trace. If Q
contains them, little variance is left for the probes.

>>> A = torch.diag(torch.tensor([100.0] + 99 * [0.01]).double())
>>> found = trace(A)
>>> round(found.value, 4), found.matvecs < 100
(100.99, True)
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .checkpoints import Checkpoint, fingerprint
from .estimates import Estimate, mean_and_error
from .krylov import Krylov
from .progress import Progress
from .random_rows import signs

TraceMethod: TypeAlias = Literal["krylov", "hutchinson", "hutch++", "xtrace"]
FrobeniusMethod: TypeAlias = Literal["krylov", "hutchinson"]
_PILOT = 8  # probes that decide how large the basis gets; they are not part of the estimate
# Probes in an estimate. With fewer, 3 standard errors are too often too few. Squared norms are skewed: they need more.
_LEAST, _LEAST_SKEWED = 60, 160
FEWEST_PRODUCTS = _LEAST_SKEWED + _PILOT  # with fewer, an error bar would be meaningless
_AT_ONCE, _AT_ONCE_ON_GPU = 16, 128  # probes multiplied together
_BLOCK = 8  # start vectors of a basis: products of a block cost little more than those of one vector
_PROBES_APART = 0x5EED  # so that probes and the start block use different random streams


def trace(
    operator: Any,
    *,
    rtol: float = 1e-2,
    method: TraceMethod = "krylov",
    max_matvecs: int = 2000,
    seed: int = 0,
    max_basis: int = 256,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Estimate:
    """The trace. Stops when the standard error is at most `rtol` of the estimate, or after `max_matvecs` products.

    `operator` may be a `Krylov` run: its basis is used, and extended while that saves products. With a `checkpoint` the
    samples are saved about once a minute, and the same call resumes from them. The basis is saved to a second file
    beside it, or to the run's own checkpoint. `max_matvecs` is never exceeded; the least is 168, because an error bar
    from fewer probes would be meaningless.
    """
    if method not in ("krylov", "hutchinson", "hutch++", "xtrace"):
        raise ValueError(f'method must be "krylov", "hutchinson", "hutch++" or "xtrace", not {method!r}')
    request = _Request("trace", method, rtol, max_matvecs, max_basis, seed)
    if method == "xtrace":
        return _xtrace(_operator_of(operator), request, checkpoint, progress)
    return _Probing(operator, _trace_samples, request, checkpoint, progress).estimate()


def frobenius_squared(
    operator: Any,
    *,
    rtol: float = 1e-2,
    method: FrobeniusMethod = "krylov",
    max_matvecs: int = 2000,
    seed: int = 0,
    max_basis: int = 256,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Estimate:
    """‖A‖²_F, the sum of the squared eigenvalues. Arguments as in `trace`.

    >>> A = torch.diag(torch.tensor([3.0, 4.0]).double())
    >>> frobenius_squared(A).value
    25.0
    """
    if method not in ("krylov", "hutchinson"):
        raise ValueError(f'method must be "krylov" or "hutchinson", not {method!r}')
    request = _Request("Frobenius norm", method, rtol, max_matvecs, max_basis, seed)
    return _Probing(operator, _frobenius_samples, request, checkpoint, progress).estimate()


# One sample per probe, from Pz (one per row) and A(Pz)
Samples: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def _trace_samples(probes: Tensor, products: Tensor) -> Tensor:
    return (probes * products).sum(1, dtype=torch.float64).cpu()


def _frobenius_samples(probes: Tensor, products: Tensor) -> Tensor:
    # In float64 from the start: the squares of small float32 numbers are zero.
    return torch.linalg.vector_norm(products, dim=1, dtype=torch.float64).square().cpu()


class _Request(NamedTuple):
    """What was asked for."""

    title: str
    method: str
    rtol: float
    max_matvecs: int
    max_basis: int
    seed: int

    def check(self) -> None:
        if self.rtol <= 0:
            raise ValueError(f"rtol must be positive, got {self.rtol}")
        if self.max_matvecs < FEWEST_PRODUCTS:
            raise ValueError(f"max_matvecs must be at least {FEWEST_PRODUCTS}, got {self.max_matvecs}")

    def identity(self, operator: Any) -> dict[str, Any]:
        """What must be equal for saved samples to be used."""
        return {**self._asdict(), "size": int(operator.shape[0]), "operator": fingerprint(operator)}


class _Probing:
    """Draws probes, projects a basis out of them, and averages until the error is small enough."""

    def __init__(
        self, operator: Any, samples: Samples, request: _Request,
        checkpoint: str | os.PathLike[str] | None, progress: bool | None,
    ):  # fmt: skip
        request.check()
        self.run = operator if isinstance(operator, Krylov) else None
        self.operator: Any = _operator_of(operator)
        self.samples_of, self.request, self.show = samples, request, progress
        self.rtol, self.max_matvecs, self.seed = request.rtol, request.max_matvecs, request.seed
        self.size = int(self.operator.shape[0])
        self.generator = torch.Generator().manual_seed(self.seed ^ _PROBES_APART)
        self.least = _LEAST if samples is _trace_samples else _LEAST_SKEWED
        self.begun = time.monotonic()
        self.matvecs = 0
        self.checkpoint = Checkpoint(checkpoint, lambda: request.identity(self.operator))

    def estimate(self) -> Estimate:
        method = self.request.method
        if method == "krylov":
            return self.with_krylov()
        return self.with_sketch() if method == "hutch++" else self.finish(None, 0.0)

    def multiply(self, rows: Tensor) -> Tensor:
        self.matvecs += len(rows)
        return (self.operator @ rows.T).T

    def draw(self, count: int) -> Tensor:
        return signs(count, self.size, self.generator, self.operator)

    def with_sketch(self) -> Estimate:
        """Q = orth(AS) for random signs S, with at most a third of the products."""
        columns = max(min(self.max_matvecs // 3, self.size, 24), 1)
        basis = torch.linalg.qr(self.multiply(self.draw(columns)).T)[0].T.contiguous()
        exact = float(self.samples_of(basis, self.multiply(basis)).sum())
        return self.finish(basis, exact)

    def with_krylov(self) -> Estimate:
        """Q = a Krylov space, extended as long as this saves more probes than it costs products.

        The products of the pilot probes are kept. With AQ known, they give the variance that a larger Q would leave,
        without further products. They are then discarded: an estimate from the probes that chose Q would understate its
        error. The state of this search is kept in the run's `notes` and saved with it.
        """
        path = self.checkpoint.path
        basis_path = None if path is None else path.with_name(path.name + ".basis")
        run = self.run or Krylov(self.operator, block=min(_BLOCK, self.size), seed=self.seed, checkpoint=basis_path)
        run.require_same_weights()
        pilot = self.draw(_PILOT)
        key = f"{', '.join(map(str, self.request))}, {run.restarts}"
        if key not in run.notes:
            run.notes[key] = {"spent": run.matvecs, "dimension": run.dimension, "in_vain": 0, "done": False}
        now = run.notes[key]
        if not now["done"]:
            self.grow(run, now, pilot)
            run.save()
        self.matvecs = _PILOT + now["matvecs"]
        if now["complete"]:
            rounding = run.accuracy * float(run.projection.norm()) * self.size**0.5
            return Estimate.exact(now["exact"], rounding, **self.cost())
        return self.finish(run.basis[: now["dimension"]], now["exact"], first=now["probes"])

    def grow(self, run: Krylov, now: dict[str, Any], pilot: Tensor) -> None:
        """Extend the basis while this saves more probes than it costs products."""
        most = min(self.request.max_basis, self.size, run.max_basis)
        # The estimate needs its least number of probes; the last block may be wider than what is left of a chunk.
        affordable = self.max_matvecs - self.least - max(run.block, len(run.next_block)) + 1
        products = self.multiply(pilot)
        values = self.residual_samples(run, pilot, products)
        run.autosave = False  # save only between two decisions, so that a resumed run decides the same
        try:
            with Progress(self.request.title, self.show) as bar:
                while now["in_vain"] < 2:
                    chunk = min(max(8, run.dimension // 8), most - run.dimension)
                    before = self.probes_needed(values, values)
                    spent = _PILOT + run.matvecs - now["spent"]
                    if chunk <= 0 or run.full or before < _LEAST / 4 or spent + chunk > affordable:
                        break
                    goal = run.dimension + chunk
                    while run.dimension < goal and not run.full:
                        run.step()
                    grown = self.residual_samples(run, pilot, products)
                    saved = self.probes_needed(values, grown) - self.probes_needed(grown, grown)
                    now["in_vain"] = 0 if saved > chunk or before > self.size == most else now["in_vain"] + 1
                    values = grown
                    run.save_if_due()
                    bar(run.dimension / most, f"{run.dimension} directions, about {before:.0f} probes to go")
        finally:
            run.autosave = True
        now["matvecs"], now["dimension"], now["complete"] = run.matvecs - now["spent"], run.dimension, run.complete
        now["exact"], now["probes"] = float(self.exact_part(run)), self.probes_needed(values, values)
        now["done"] = True

    def exact_part(self, run: Krylov) -> Tensor:
        if self.samples_of is _trace_samples:
            return run.projection.diagonal().sum()
        return run.projection.square().sum() + run.coupling.square().sum()

    def residual_samples(self, run: Krylov, probes: Tensor, products: Tensor) -> Tensor:
        """The samples for the current basis of the run, from products with the whole probes."""
        inside = run.basis @ probes.T
        projected = (run.projection.to(inside) @ inside).T @ run.basis  # A Q Qᵀz, in the basis and in the next block
        projected += (run.coupling.to(inside) @ inside).T @ run.next_block
        outside = probes - inside.T @ run.basis
        return self.exact_part(run) + self.samples_of(outside, products - projected)

    def probes_needed(self, values: Tensor, level: Tensor) -> float:
        """How many probes the requested error needs if samples vary like `values` and the mean is like `level`."""
        target = self.rtol * abs(float(level.mean()))
        spread = float(values.std())
        return 0.0 if spread == 0 else float("inf") if target == 0 else (spread / target) ** 2

    def finish(self, basis: Tensor | None, exact: float, first: float = 0.0) -> Estimate:
        """Probe the complement of the basis until the error is small enough."""
        now: dict[str, Any] = {"samples": torch.empty(0, dtype=torch.float64), "wanted": first, "goal": 0}
        if (found := self.checkpoint.load()) is not None:
            now = found
            self.generator.set_state(now["generator"])
            self.matvecs += len(now["samples"])
            self.begun -= now["seconds"]

        def state() -> dict[str, Any]:
            return {**now, "generator": self.generator.get_state(), "seconds": self.elapsed}

        samples = now["samples"]
        with Progress(self.request.title, self.show) as bar:
            while True:
                while len(samples) < now["goal"]:
                    probes = self.draw(min(self.at_once, now["goal"] - len(samples)))
                    if basis is not None and len(basis):
                        probes -= (probes @ basis.T) @ basis
                    now["samples"] = samples = torch.cat([samples, self.samples_of(probes, self.multiply(probes))])
                    self.checkpoint.save(state)
                    bar(self.matvecs / self.max_matvecs, f"{len(samples)} probes of about {now['goal']}")
                if len(samples):
                    value, error, *_ = mean_and_error(samples + exact)
                    if error <= self.rtol * abs(value) or self.matvecs >= self.max_matvecs:
                        break
                    now["wanted"] = 1.1 * len(samples) * (error / (self.rtol * abs(value) or error)) ** 2 + 1
                # Few, large steps: an estimate that may stop after every probe understates its error.
                affordable = max(self.max_matvecs - self.matvecs, 0 if len(samples) else self.least)
                most = min(len(samples) + affordable, 4 * max(len(samples), self.least))
                now["goal"] = math.ceil(min(max(now["wanted"], self.least), most))
        self.checkpoint.save(state, now=True)
        return Estimate.of(samples + exact, rtol=self.rtol, **self.cost())

    def cost(self) -> dict[str, Any]:
        how = getattr(self.operator, "how", "")
        rest = {"seconds": self.elapsed, "seed": self.seed, "method": self.request.method, "how": how}
        return {"matvecs": self.matvecs, **rest}

    @property
    def at_once(self) -> int:
        """How many probes are multiplied together: many on a GPU, but at most a quarter of a gigabyte."""
        fit = 2**28 // (self.size * torch.finfo(self.operator.dtype).bits // 8)
        return max(min(fit, _AT_ONCE if self.operator.device.type == "cpu" else _AT_ONCE_ON_GPU), 1)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun


def _xtrace(operator: Any, request: _Request, path: str | os.PathLike[str] | None, progress: bool | None) -> Estimate:
    """For every probe, the basis is spanned by the images of all others. Two products per probe."""
    request.check()
    begun, size, rtol = time.monotonic(), int(operator.shape[0]), request.rtol
    generator = torch.Generator().manual_seed(request.seed ^ _PROBES_APART)
    empty = torch.empty(size, 0, device=operator.device, dtype=operator.dtype)
    images, basis, mapped = empty, empty, empty
    checkpoint = Checkpoint(path, lambda: request.identity(operator))
    if (saved := checkpoint.load()) is not None:
        images, basis, mapped = (saved[name].to(empty) for name in ("images", "basis", "mapped"))
        begun -= saved["seconds"]
    probes = signs(images.shape[1], size, generator, operator).T.contiguous()
    with Progress("trace", progress) as bar:
        while True:
            if probes.shape[1]:
                samples = _leave_one_out(probes, images, basis, mapped)
                value, error, *_ = mean_and_error(samples)
                spent = 2 * probes.shape[1]
                bar(spent / request.max_matvecs, f"relative error {error / max(abs(value), 1e-300):.1%}")
                if error <= rtol * abs(value) or spent == 2 * size or 3 * spent // 2 > request.max_matvecs:
                    break
            grown = min(max(_LEAST, images.shape[1] * 3 // 2), size)
            fresh = signs(grown - probes.shape[1], size, generator, operator).T
            probes = torch.cat([probes, fresh], dim=1)
            images = torch.cat([images, operator @ fresh], dim=1)
            new = images[:, basis.shape[1] :]
            for _ in range(3):  # vectors inside the basis leave rounding errors, which must be orthogonal to it too
                new = torch.linalg.qr(new - basis @ (basis.T @ new))[0]
            basis = torch.cat([basis, new], dim=1)
            mapped = torch.cat([mapped, operator @ basis[:, mapped.shape[1] :]], dim=1)
            parts = {"images": images.cpu(), "basis": basis.cpu(), "mapped": mapped.cpu()}
            checkpoint.save(lambda parts=parts: {**parts, "seconds": time.monotonic() - begun}, now=True)
    how = getattr(operator, "how", "")
    rest = {"seconds": time.monotonic() - begun, "seed": request.seed, "method": "xtrace", "how": how}
    if probes.shape[1] == size:  # the basis spans the whole space
        rounding = torch.finfo(basis.dtype).eps * float(mapped.norm()) * size**0.5
        return Estimate.exact(float((basis * mapped).sum()), rounding, matvecs=spent, **rest)
    return Estimate.of(samples, rtol=rtol, matvecs=spent, **rest)


def _leave_one_out(probes: Tensor, images: Tensor, basis: Tensor, mapped: Tensor) -> Tensor:
    """tr Q₍ᵢ₎ᵀAQ₍ᵢ₎ + the residual of probe i, where Q₍ᵢ₎ spans the images of all probes but the i-th."""
    projected = (basis.T @ mapped).double()  # QᵀAQ
    triangle = (basis.T @ images).double()  # QᵀAΩ
    inside = (basis.T @ probes).double()  # QᵀΩ
    quadratic = (probes * images).sum(0, dtype=torch.float64)
    # Column i: the direction in Q that the other images do not span. There is none if the images are linearly
    # dependent: then all but one of them still span the whole range of A.
    sizes = torch.linalg.svdvals(triangle)
    if float(sizes.min()) <= torch.finfo(images.dtype).eps * len(sizes) * float(sizes.max()):
        left_out = torch.zeros_like(triangle)
    else:
        left_out = torch.linalg.inv(triangle).T
        left_out = left_out / left_out.norm(dim=0)
    inside = inside - left_out * (left_out * inside).sum(0)
    without = projected.diagonal().sum() - (left_out * (projected @ left_out)).sum(0)
    residual = quadratic - 2 * (inside * triangle).sum(0) + (inside * (projected @ inside)).sum(0)
    return (without + residual).cpu()


def _operator_of(operator: Any) -> Any:
    """The operator of a Krylov run; any other operator itself."""
    return operator.operator if isinstance(operator, Krylov) else operator
