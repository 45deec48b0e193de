"""Products with one batch's Hessian: by double backward, forward over reverse, or central differences.

Each function evaluates a batch at given weights and returns a product function and the batch's loss. The product
function takes the pieces of a vector, one per parameter, and returns those of the product. If batched, the pieces have
a leading dimension of several vectors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, jvp, vjp, vmap

from .objective import Objective

Product: TypeAlias = Callable[[Sequence[Tensor], bool], Sequence[Tensor]]


def double_backward(
    objective: Objective, weights: list[Tensor], batch: Any, check: bool = True
) -> tuple[Product, Tensor]:
    """Products by double backward. The graph of the gradient is kept; a product is one backward pass through it."""
    loss = objective.differentiable(objective.evaluate(weights, batch)[1])
    grads = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    curved = [i for i, g in enumerate(grads) if g is not None and g.requires_grad]
    if check:
        _require_twice_differentiable([grads[i] for i in curved])

    def product(vector: Sequence[Tensor], batched: bool) -> Sequence[Tensor]:
        if not curved:  # the loss is linear in the weights
            return [torch.zeros_like(w) for w in weights]
        outer, inner = [grads[i] for i in curved], [vector[i] for i in curved]
        return torch.autograd.grad(
            outer, weights, inner,
            retain_graph=True, allow_unused=True, materialize_grads=True, is_grads_batched=batched,
        )  # fmt: skip

    return product, loss


def forward_over_reverse(objective: Objective, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
    """Products as the derivative of the gradient along a vector. Several vectors share one loss and gradient."""
    fixed = [w.detach() for w in weights]
    # An ordinary pass shows whether the loss depends on the weights; torch.func would return a zero gradient.
    loss = objective.differentiable(objective.evaluate(weights, batch)[1]).detach()

    def one(vector: Sequence[Tensor]) -> Sequence[Tensor]:
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(w, v) for w, v in zip(weights, vector, strict=True)]
            moving = objective.differentiable(objective.evaluate(dual, batch)[1])
            grads = torch.autograd.grad(moving, dual, allow_unused=True, materialize_grads=True)
            tangents = [forward_ad.unpack_dual(g).tangent for g in grads]
        return [torch.zeros_like(w) if t is None else t for w, t in zip(weights, tangents, strict=True)]

    def several(vectors: Sequence[Tensor]) -> Sequence[Tensor]:
        slope = grad(lambda point: objective.evaluate(point, batch)[1])
        along = vmap(lambda vector: jvp(slope, (fixed,), (vector,))[1], randomness="same")
        return along(list(vectors))

    def product(vector: Sequence[Tensor], batched: bool) -> Sequence[Tensor]:
        with _without_torchs_own_warnings():
            return several(vector) if batched else one(vector)

    return product, loss


def central_difference(objective: Objective, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
    """Products by central differences, (g(w + hv̂) − g(w − hv̂))‖v‖/2h, for three steps h, a factor of ten apart.

    The best h varies between directions by a factor of a hundred. From one step to the next smaller one, the truncation
    error falls by 100 and the rounding error grows by 10. So if the last two results differ much less than the first
    two, truncation dominates and the smallest step is the best; otherwise the middle one is.
    """
    fixed = [w.detach() for w in weights]
    size = float(torch.linalg.vector_norm(objective.flat(fixed))) or 1.0
    steps = [size * (1e-2 if objective.dtype == torch.float32 else 1e-3) / 10**k for k in range(3)]

    def gradient(point: list[Tensor]) -> Tensor:
        point = [p.detach().requires_grad_() for p in point]
        loss = objective.differentiable(objective.evaluate(point, batch)[1])
        return objective.flat(torch.autograd.grad(loss, point, allow_unused=True, materialize_grads=True))

    def one(vector: Sequence[Tensor]) -> Sequence[Tensor]:
        length = float(torch.linalg.vector_norm(objective.flat(vector)))
        if length == 0:
            return [torch.zeros_like(v) for v in vector]
        found = []
        for step in steps:
            shift = step / length
            ahead = gradient([w + shift * v for w, v in zip(fixed, vector, strict=True)])
            behind = gradient([w - shift * v for w, v in zip(fixed, vector, strict=True)])
            found.append((ahead - behind) / (2 * shift))
        first, second = (torch.linalg.vector_norm(a - b) for a, b in pairwise(found))
        return objective.vector(found[2] if first > 10 * second else found[1]).tensors

    def product(vector: Sequence[Tensor], batched: bool) -> Sequence[Tensor]:
        if not batched:
            return one(vector)
        rows = [one(each) for each in zip(*vector, strict=True)]
        return [torch.stack(pieces) for pieces in zip(*rows, strict=True)]

    with torch.no_grad():
        loss = objective.evaluate(fixed, batch)[1]
    return product, loss


def gauss_newton(objective: Objective, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
    """Products with JᵀBJ by three backward passes through kept graphs; B is the Hessian of the loss in the outputs."""
    output, loss = objective.evaluate(weights, batch)
    objective.differentiable(loss)
    _require_tensor(output)
    (slope,) = torch.autograd.grad(loss, output, create_graph=True)
    dual = torch.zeros_like(output, requires_grad=True)  # Jᵀu as a function of u: its derivative is J
    pulled = torch.autograd.grad(output, weights, dual, create_graph=True, allow_unused=True, materialize_grads=True)
    used = [i for i, p in enumerate(pulled) if p.requires_grad]

    def product(vector: Sequence[Tensor], batched: bool) -> Sequence[Tensor]:
        if not slope.requires_grad:  # the loss is linear in the outputs
            return [torch.zeros_like(w) for w in weights]
        outer, inner = [pulled[i] for i in used], [vector[i] for i in used]
        moved = torch.autograd.grad(outer, dual, inner, retain_graph=True, is_grads_batched=batched)
        bent = torch.autograd.grad(slope, output, moved, retain_graph=True, is_grads_batched=batched)
        return torch.autograd.grad(
            output, weights, bent,
            retain_graph=True, allow_unused=True, materialize_grads=True, is_grads_batched=batched,
        )  # fmt: skip

    return product, loss


def gauss_newton_forward(objective: Objective, weights: list[Tensor], batch: Any) -> tuple[Product, Tensor]:
    """Products with JᵀBJ: J forward, B forward over reverse, Jᵀ backward. Several vectors share the model's passes."""
    fixed = [w.detach() for w in weights]
    output, loss = objective.evaluate(weights, batch)
    objective.differentiable(loss)
    _require_tensor(output)
    output = output.detach()

    def outputs(point: list[Tensor]) -> Tensor:
        return objective.evaluate(point, batch)[0]

    def product(vector: Sequence[Tensor], batched: bool) -> Sequence[Tensor]:
        with _without_torchs_own_warnings():
            pull: Any = vjp(outputs, fixed)[1]
            slope = grad(lambda out: objective.loss_of(out, batch))

            def one(v: list[Tensor]) -> list[Tensor]:
                moved = jvp(outputs, (fixed,), (v,))[1]
                return pull(jvp(slope, (output,), (moved,))[1])[0]

            return vmap(one, randomness="same")(list(vector)) if batched else one(list(vector))

    return product, loss.detach()


def saved_bytes(linearise: Callable[[], Any], apart_from: Sequence[Tensor]) -> int:
    """The bytes that the graph built by a function keeps alive, apart from given tensors."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        linearise()
    for tensor in apart_from:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return max(sum(sizes.values()), 1)


def undifferentiable(error: Exception) -> bool:
    """Whether an error says that an operation lacks a derivative."""
    words = ("not implemented", "does not support", "differentiate twice", "ZeroTensors are immutable")
    return isinstance(error, NotImplementedError) or any(w in str(error) for w in words)


def _require_twice_differentiable(grads: Sequence[Tensor]) -> None:
    """Raise if the graph has an operation that is differentiable only once: its second derivative would be zero.

    Weight normalisation is one of them: torch's fused kernel treats its norms as constants and fails gradgradcheck.
    """
    seen: set[Any] = set()
    ahead = [g.grad_fn for g in grads]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("Error") or node.name().startswith("WeightNormInterface"):
            raise NotImplementedError("an operation in the model cannot be differentiated twice")
        ahead += [following for following, _ in node.next_functions]


def _require_tensor(output: Any) -> None:
    if not isinstance(output, Tensor):
        raise TypeError(f"GaussNewton needs a model whose output is a tensor, got {type(output).__name__}")


@contextmanager
def _without_torchs_own_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.func's use of torch.jit
        warnings.filterwarnings("ignore", message=".*performance drop.*")  # operations that vmap runs in a loop
        yield
