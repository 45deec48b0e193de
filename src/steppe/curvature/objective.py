"""The loss of a model over data, as a function of the weights: what all measurements evaluate.

Everything in `steppe.curvature` evaluates a model through an `Objective`: the loss and its gradient over all the data,
at the weights or near them. An evaluation has no side effects. The weights are never changed (the model is called with
other tensors in their place), and buffers, modes, random state and ``.grad`` are unchanged afterwards.

>>> model = torch.nn.Linear(2, 1)
>>> x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [0.0]])
>>> objective = Objective(model, torch.nn.functional.mse_loss, (x, y))
>>> loss, gradient = objective.gradient()
>>> bool(objective.loss(-0.01 * gradient) < loss)
True
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..engine.host_random import HostRandomState
from ..engine.isolation import Snapshot
from ..support.devices import default_generator
from ..support.wrappers import unwrapped
from ..vector import Space, Vector
from .batches import Data, count, ignored_target, length, setting, without_partials
from .parameters import Selection, require_measurable, select
from .substitution import substituted
from .weighted_sums import WeightedSums

Mode: TypeAlias = Literal["eval", "batch", "train", "as-is"]

_PLACES = 999  # about as many entries of a tensor are looked at, to see whether they have changed places
_MODES = ("eval", "batch", "train", "as-is")


class Objective:
    """The loss of a model over data.

    Args:
        model: Any module. Wrappers of DistributedDataParallel and `torch.compile` are removed.
        loss_fn: ``loss_fn(output, target)``, which returns one number per batch. With `forward`:
            ``loss_fn(output, batch)``.
        data: A pair of tensors, a list of batches, a DataLoader, or any other iterable of ``(input, target)`` batches.
        params: Which parameters are measured: name patterns (``"layer1.*"``), parameters, a submodule or a function
            of name and parameter. Default: all that require a gradient.
        forward: ``forward(model, batch) -> output`` where batches are not ``(input, target)`` pairs.
        weight: ``weight(batch)``: how many samples or tokens the batch's mean loss is a mean of. Default: the number
            of target entries that are not ignored, weighted by the loss's class weights if it has any.
        reduction: ``"mean"`` or ``"sum"``: what the loss does over a batch. Default: what `loss_fn` says, else mean.
        mode: ``"eval"``; ``"batch"``: like eval, but BatchNorm uses batch statistics; ``"train"``: with dropout too,
            and the same masks in every evaluation; ``"as-is"``: the modes that the modules have.
        samples: How many samples are used: the first ones of a pass over the data. Default: all.
        group: The process group over whose ranks the data is split. Every rank must make the same calls.
        cache_bytes: Batches are kept on the device if all of them together are no larger than this.
        seed: For the random numbers of the model (dropout) and of the loader (shuffling).
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        data: Any,
        *,
        params: Selection = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        weight: Callable[[Any], float | Tensor] | None = None,
        reduction: Literal["mean", "sum"] | None = None,
        mode: Mode = "eval",
        samples: int | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        cache_bytes: int = 2**30,
        seed: int = 0,
    ):
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(map(repr, _MODES))}, not {mode!r}")
        if samples is not None and samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        self.model = unwrapped(model)
        self.loss_fn, self.mode, self.group, self.seed = loss_fn, mode, group, seed
        self._forward, self._weight = forward, weight
        self.reduction = found = reduction or setting(loss_fn, "reduction", "mean")
        if found not in ("mean", "sum"):
            raise ValueError(f'the loss must be reduced over the batch: reduction "mean" or "sum", not {found!r}')
        selected = select(self.model, params)
        require_measurable(selected)
        self.names = list(selected)
        self.space = Space([p.detach() for p in selected.values()])
        self._offset_weights: list[Tensor] | None = None  # set by `at`; None for the model's own weights
        self._batch_weights: dict[int, float] = {}  # by the batch's index
        self._data = Data(data, paired=forward is None, samples=samples, cache_bytes=cache_bytes, like=self.weights())

    # Weights

    @property
    def size(self) -> int:
        """How many weights are measured."""
        return sum(p.numel() for p in self.space.params)

    @property
    def device(self) -> torch.device:
        """The device of flat vectors: the first parameter's."""
        return self.space.params[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of flat vectors: float64 if any parameter is float64, else float32."""
        return torch.float64 if any(p.dtype == torch.float64 for p in self.space.params) else torch.float32

    def weights(self) -> list[Tensor]:
        """The weights at which the loss is measured, one tensor per parameter. They are not copies."""
        return self._offset_weights if self._offset_weights is not None else [p.detach() for p in self._measured()]

    def _measured(self) -> list[nn.Parameter]:
        """The measured parameters as they are now: `load_state_dict(..., assign=True)` makes new ones."""
        now = dict(self.model.named_parameters())
        found = [now.get(name) for name in self.names]
        fit = [p is not None and p.shape == like.shape for p, like in zip(found, self.space.params, strict=True)]
        if not all(fit):
            changed = self.names[fit.index(False)]
            raise RuntimeError(f"{changed} is gone or has another shape since this objective was made: make a new one")
        return [p for p in found if p is not None]

    def weights_vector(self) -> Vector:
        """The weights at which the loss is measured, as a vector."""
        return self.space.vector(self.weights())

    def at(self, offset: Vector) -> Objective:
        """The same loss, measured at w + offset. The model keeps its weights."""
        there = copy.copy(self)
        there._offset_weights = [w + e.to(w) for w, e in zip(self.weights(), offset.tensors, strict=True)]
        return there

    def restricted(self, params: Selection) -> Objective:
        """The same loss as a function of fewer parameters: the measured ones that are selected."""
        fewer = copy.copy(self)
        selected = {name: p for name, p in select(self.model, params).items() if name in self.names}
        require_measurable(selected)
        fewer.names = list(selected)
        if self._offset_weights is not None:
            raise ValueError("restrict the parameters first, then move: objective.restricted(...).at(...)")
        fewer.space = Space([p.detach() for p in selected.values()])
        return fewer

    def state(self) -> tuple[Any, ...]:
        """A value that changes with weights, buffers and (if mode is "as-is") modes. Then cached results are stale."""
        tensors = self._tensors()
        versions = [(t._version, t.data_ptr()) for t in tensors]
        modes = [module.training for module in self.model.modules()] if self.mode == "as-is" else []
        return *versions, *modes, *self.fingerprint()  # only the fingerprint shows changes through `.data`

    def fingerprint(self) -> list[float]:
        """Numbers of each weight and buffer, to detect other weights; one transfer from the device.

        The norm, the maximum, and a mean over places that are not alike, which changes if neurons change places.
        """
        numbers = [t for t in self._tensors() if t.is_floating_point() and t.numel()]
        some = [t.reshape(-1)[:: max(t.numel() // _PLACES, 1)] for t in numbers]
        placed = [(t * torch.linspace(0, 1, len(t), dtype=t.dtype, device=t.device)).mean() for t in some]
        found = [*torch._foreach_norm(numbers), *torch._foreach_max(numbers), *placed]
        return torch.stack([number.to(self.device, self.dtype) for number in found]).tolist()

    def _tensors(self) -> list[Tensor]:
        return [t.detach() for t in (*self.model.parameters(), *self.model.buffers())]

    def vector(self, flat: Tensor) -> Vector:
        """A flat tensor as a vector in weight space."""
        pieces = flat.split([p.numel() for p in self.space.params])
        return self.space.vector(
            [piece.view(p.shape).to(p) for piece, p in zip(pieces, self.space.params, strict=True)]
        )

    def flat(self, vector: Vector | Sequence[Tensor]) -> Tensor:
        """A vector in weight space as one flat tensor, parameters in the model's order."""
        tensors = vector.tensors if isinstance(vector, Vector) else vector
        return torch.cat([t.detach().reshape(-1).to(self.device, self.dtype) for t in tensors])

    # Evaluation

    def loss(self, offset: Vector | None = None, *, finite: bool = True) -> Tensor:
        """The loss at the weights or at w + offset. A loss that is not finite is an error unless `finite` is False."""
        here = self if offset is None else self.at(offset)
        total = here.sums()
        with here.isolated(), torch.no_grad():
            for batch, weight in here.batches():
                total.add(here.evaluate(here.weights(), batch)[1], weight)
        return total.loss(finite=finite)

    def gradient(self, offset: Vector | None = None) -> tuple[Tensor, Vector]:
        """The loss and its gradient, at the weights or at w + offset."""
        here = self if offset is None else self.at(offset)
        total = here.sums(here.size)
        with here.isolated():
            for batch, weight in here.batches():
                weights = [w.detach().requires_grad_() for w in here.weights()]
                loss = here.differentiable(here.evaluate(weights, batch)[1])
                grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
                total.add(loss.detach(), weight, here.flat(grads))
        return total.loss(), here.vector(total.mean())

    def evaluate(self, weights: Sequence[Tensor], batch: Any) -> tuple[Any, Tensor]:
        """The model's output and the loss on one batch, with given weights. Call it inside `isolated`."""
        self._seed_model()
        values = {id(p): p.detach() for p in self.model.parameters()}
        values |= {id(b): b.detach().clone() for b in self.model.buffers()}
        values |= {id(p): w for p, w in zip(self._measured(), weights, strict=True)}
        with substituted(self.model, values):  # the loss too: it may be a function of the weights, as a penalty is
            output = self._forward(self.model, batch) if self._forward else self.model(batch[0])
            return output, self.loss_of(output, batch)

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """The loss of an output on its batch."""
        loss = self.loss_fn(output, batch if self._forward else batch[1])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f'loss_fn must return one number per batch, got {what}: use reduction="mean" or "sum"')
        return loss.reshape(())

    def differentiable(self, loss: Tensor) -> Tensor:
        """The loss itself; an error if it has no gradient."""
        if not loss.requires_grad:
            raise ValueError(
                "the loss has no gradient with respect to the measured parameters: it is detached, computed without "
                "autograd, or does not use them; return a differentiable loss, or measure other params"
            )
        return loss

    def batches(self) -> Generator[tuple[Any, float], None, None]:
        """All batches, on the device, each with its weight. Call it inside `isolated`."""
        for index, batch in enumerate(self._data):
            if index not in self._batch_weights or not self._data.kept:  # cached: computing a weight synchronises
                self._batch_weights[index] = 1.0 if self.reduction == "sum" else float(self._weigh(batch))
            yield batch, self._batch_weights[index]

    @property
    def cached(self) -> bool:
        """Whether all batches are kept on the device, so that another reference to them costs no memory."""
        return self._data.kept

    def sums(self, *shape: int) -> WeightedSums:
        """An empty weighted sum over batches: of losses, and of tensors of a shape if one is given."""
        divide = self.reduction == "mean"
        return WeightedSums(shape, group=self.group, divide=divide, device=self.device, dtype=self.dtype)

    def _weigh(self, batch: Any) -> float | Tensor:
        if self._weight is not None:
            return self._weight(batch)
        targets = batch[1] if self._forward is None else _targets_of(batch)
        if targets is None:
            return length(batch)
        weights, inner = setting(self.loss_fn, "weight", None), without_partials(self.loss_fn)
        if inner is F.multi_margin_loss or isinstance(inner, nn.MultiMarginLoss):
            weights = None  # this loss weights the classes, but divides by the number of samples
        if not isinstance(weights, Tensor) or weights.dim() != 1:
            weights = None  # an attribute of the user's own loss, not a weight for each class
        return count(targets, ignored_target(self.loss_fn), weights)

    # Isolation

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Set modes, seeds and exact kernels for evaluations; restore modes and random states afterwards."""
        modes = [(module, module.training) for module in self.model.modules()]
        snapshot = Snapshot((), {p.device for p in self.space.params})
        host_random_state = HostRandomState()
        loader_rngs = [(g, g.get_state()) for g in self._data.generators()]
        with self.exact_kernels():
            try:
                self._set_modes()
                random.seed(self.seed)
                if (numpy := sys.modules.get("numpy")) is not None:  # a loader that uses NumPy has imported it
                    numpy.random.seed(self.seed % 2**32)
                for generator, _ in loader_rngs:
                    generator.manual_seed(self.seed)
                self._seed_model()
                yield
            finally:
                for module, training in modes:
                    module.training = training
                snapshot.restore()
                host_random_state.restore()
                for generator, state in loader_rngs:
                    generator.set_state(state)

    @contextmanager
    def exact_kernels(self) -> Iterator[None]:
        """A context with twice differentiable attention, and without autocast, TF32 and fused inference paths."""
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            stack.enter_context(torch.enable_grad())
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            if self.device.type == "cuda":
                stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
                torch.set_float32_matmul_precision("highest")
                # cuDNN's recurrent layers have no second derivative
                recurrent = any(isinstance(module, nn.RNNBase) for module in self.model.modules())
                stack.enter_context(torch.backends.cudnn.flags(enabled=not recurrent, allow_tf32=False))
            yield

    def _set_modes(self) -> None:
        if self.mode == "as-is":
            return
        for module in self.model.modules():
            normalises = isinstance(module, nn.modules.batchnorm._BatchNorm)
            module.training = self.mode == "train" or (self.mode == "batch" and normalises)

    def _seed_model(self) -> None:
        """Seed the device generators, so that every evaluation of a batch has the same dropout masks."""
        torch.random.default_generator.manual_seed(self.seed)
        for device in {p.device for p in self.space.params}:
            if device.type == "cuda":
                default_generator(device).manual_seed(self.seed)
            elif device.type not in ("cpu", "meta"):
                torch.get_device_module(device).manual_seed(self.seed)


def _targets_of(batch: Any) -> Tensor | None:
    """The targets in a batch that is not an (input, target) pair, if they are where they usually are."""
    if isinstance(batch, Mapping):
        found = [batch[name] for name in ("labels", "targets", "target") if name in batch]
    else:
        found = list(batch[1:2]) if isinstance(batch, (tuple, list)) else []
    return found[0] if found and isinstance(found[0], Tensor) else None
