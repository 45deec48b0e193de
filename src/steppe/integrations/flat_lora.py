"""Flat-LoRA: fine-tune adapters (LoRA, with PEFT) so that the merged weights are in a flat place.

with FlatLoRA(model, sigma=0.05) as noise:
    for step in range(steps):
        noise.progress = step / steps
        ...                                  # your training step, unchanged
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.shards import sharded


class FlatLoRA:
    """Noise on the merged weights (Li, He, Li et al.; ICML 2025; arXiv 2409.14396): one gradient a step, any optimizer.

    An adapter changes a frozen weight W (m × n) to W' = W + s·BA, and W' is what is used after training. SAM on A and B
    perturbs a small subspace of it. Flat-LoRA adds noise to all of it, in proportion to the norm of each row, and
    takes the gradient of A and B there:

        ε_ij = σ_t ‖W'_i‖/√n · ξ_ij,   ξ ~ N(0, 1)                          (1)
        d    = ∇_{A,B} L(W' + ε)                                            (2)
        σ_t  = σ (1 − cos(π · progress)) / 2                                (3)

    Noise is part of the forward pass of the adapted linear layers, in training only: not after `model.eval()`, and not
    where adapters are disabled or merged. So a loop, a trainer or `SharpnessAware` need not know of it. A layer draws
    its noise as dropout does, from PyTorch's random state (on the CPU): each forward pass has other noise; gradient
    checkpointing repeats it, and all looks of a step see the same.

    The weights are never written to. Published code adds ε to W in W's own precision and subtracts it after the
    backward pass: in bfloat16 W drifts, and an interrupt or an incomplete accumulation leaves the noise in it. It also
    seeds PyTorch's random state by the clock in each step, and with it dropout and the order of the data.

    Noise is drawn in the forward and again in the backward pass, for one layer at a time, so no memory is kept
    in between. Its cost on a GPU was not measured. A step with it cannot be captured as a CUDA graph.

    Args:
        model: a model with LoRA adapters of PEFT. Adapted embeddings and convolutions have no noise. Variants (DoRA),
            quantised weights and tensor parallelism are refused.
        sigma (share of a weight's typical size, ≥ 0): the noise at the end of training; 0.05 in the published command.
            0 changes nothing.

    Set `progress`, the share of training that is over, before each step; it is 1 until then: noise of full size.
    `remove()`, or the end of the `with` block, makes the layers what they were.
    """

    def __init__(self, model: nn.Module, sigma: float = 0.05):
        if isinstance(sigma, bool) or not isinstance(sigma, (int, float)) or not 0 <= sigma < math.inf:
            raise ValueError(f"FlatLoRA: sigma must be a number that is not negative, not {sigma!r}")
        self.sigma, self._progress = float(sigma), 1.0
        adapters: list[Any] = [one for one in model.modules() if _is_adapter(one) and _is_linear(one)]
        if not adapters:
            raise ValueError(
                "FlatLoRA: no linear layer of the model has a LoRA adapter: call peft.get_peft_model first"
            )
        self._layers: list[nn.Module] = [adapter.base_layer for adapter in adapters]
        for adapter, layer in zip(adapters, self._layers, strict=True):
            vars(layer)["forward"] = _Noisy(self, adapter)

    @property
    def progress(self) -> float:
        """The share of training that is over."""
        return self._progress

    @progress.setter
    def progress(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"FlatLoRA: progress is the share of training that is over, from 0 to 1, not {share!r}")
        self._progress = float(share)

    @property
    def strength(self) -> float:
        """σ_t: equation (3)."""
        return self.sigma * (1 - math.cos(math.pi * self._progress)) / 2

    def remove(self) -> None:
        """Take the noise out of the layers, unless a later `FlatLoRA` has replaced it."""
        for layer in self._layers:
            own = vars(layer).get("forward")
            if isinstance(own, _Noisy) and own.noise is self:
                del vars(layer)["forward"]

    def __enter__(self) -> FlatLoRA:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _is_adapter(module: nn.Module) -> bool:
    """Whether a module is a LoRA layer. By its attributes, so that PEFT need not be imported."""
    return all(hasattr(module, name) for name in ("base_layer", "lora_A", "lora_B", "scaling", "active_adapters"))


def _is_linear(adapter: Any) -> bool:
    """Whether an adapted layer is one that gets noise; raises for a linear layer that cannot get it."""
    layer = adapter.base_layer
    if getattr(adapter, "lora_variant", None):
        raise ValueError("FlatLoRA is for plain LoRA: this adapter is a variant of it (DoRA or another one)")
    if not isinstance(vars(layer).get("forward"), (_Noisy, type(None))):
        raise RuntimeError(
            "FlatLoRA: another library has replaced the forward pass of an adapted layer (accelerate does, to keep "
            "weights on the CPU or the disk): load the model without it"
        )
    if type(layer) is nn.Linear or type(layer).__name__ == "Conv1D":  # the linear layer of GPT-2 in transformers
        return True
    if isinstance(layer, nn.Linear) or (layer.weight.dim() == 2 and not layer.weight.is_floating_point()):
        raise ValueError(
            f"FlatLoRA needs the weights of adapted layers as they are, but {type(layer).__name__} is a linear layer "
            "of another kind (quantised?): load the model without quantisation"
        )
    return False


class _Noisy:
    """The forward pass of an adapted linear layer, with noise."""

    def __init__(self, noise: FlatLoRA, adapter: Any):
        self.noise, self.adapter = noise, adapter

    @torch.compiler.disable
    def __call__(self, inputs: Tensor) -> Tensor:
        adapter, layer, strength = self.adapter, self.adapter.base_layer, self.noise.strength
        off = adapter.disable_adapters or adapter.merged or not adapter.training
        if off or strength == 0:
            return type(layer).forward(layer, inputs)
        # Rows are outputs. Conv1D stores its weight the other way round:
        weight = layer.weight if type(layer) is nn.Linear else layer.weight.T
        if sharded(weight):
            raise RuntimeError("FlatLoRA does not work with tensor parallelism: a rank has a part of a weight only")
        if layer.weight.requires_grad:
            raise RuntimeError("FlatLoRA is for adapters of frozen weights, but an adapted weight requires a gradient")
        seed = int(torch.randint(2**62, (), device="cpu"))
        device = inputs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        outputs = _NoisyProduct.apply(inputs.to(dtype), weight, strength * _scales(adapter, weight), seed)
        return outputs if layer.bias is None else outputs + layer.bias.to(dtype)


def _scales(adapter: Any, weight: Tensor) -> Tensor:
    """‖W'_i‖/√n for every row of the merged weight: equation (1)."""
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        merged = weight.detach().float() if weight.dtype != torch.float64 else weight.detach()
        for name in adapter.active_adapters:
            if name in adapter.lora_A:
                a, b = adapter.lora_A[name].weight.to(merged), adapter.lora_B[name].weight.to(merged)
                merged = torch.addmm(merged, b, a, alpha=adapter.scaling[name])
        return merged.norm(dim=1, keepdim=True) / math.sqrt(weight.shape[1])


class _NoisyProduct(torch.autograd.Function):
    """x (W + ε)ᵀ. The noise is drawn again from its seed in the backward pass, so it takes no memory until then."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, scales: Tensor, seed: int) -> Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.seed = seed
        return F.linear(inputs, _with_noise(weight, scales, seed, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        weight, scales = ctx.saved_tensors
        (grad,) = grad_outputs
        return grad @ _with_noise(weight, scales, ctx.seed, grad.dtype), None, None, None


def _with_noise(weight: Tensor, scales: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """W + ε, added in float32 or better, in the precision of the product."""
    generator = torch.Generator(weight.device).manual_seed(seed)
    noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=scales.dtype)
    return noise.mul_(scales).add_(weight).to(dtype)
