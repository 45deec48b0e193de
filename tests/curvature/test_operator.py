"""The operator against dense Hessians, and what it must leave alone."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from helpers.curvature_problems import cnn, digits, mlp, ragged
from steppe.curvature import GaussNewton, Hessian, Objective, Scaled, operator


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return float((a - b).abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.parametrize("way", ["auto", "graph", "fresh"])
def test_products_equal_the_dense_hessian(all_problems, index, way):
    problem, dense = all_problems[index]
    H = Hessian(problem.model, problem.loss_fn, problem.batches, mode=problem.mode, way=way)
    assert H.shape == dense.shape
    assert close(H.dense(), dense, 1e-10)


def test_forward_over_reverse(all_problems, index):
    problem, dense = all_problems[index]
    if problem.loss_fn is F.mse_loss:
        pytest.skip("torch cannot differentiate mse_loss forward over reverse")
    H = Hessian(problem.model, problem.loss_fn, problem.batches, mode=problem.mode, way="forward")
    block = torch.eye(len(dense), dtype=torch.float64)[:, ::9]
    assert close(H @ block, dense @ block, 1e-10)


def test_central_difference(all_problems, index):
    problem, dense = all_problems[index]
    H = Hessian(problem.model, problem.loss_fn, problem.batches, mode=problem.mode, way="difference")
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(len(dense), 4, generator=generator, dtype=torch.float64)
    assert close(H @ block, dense @ block, 1e-6)


def test_central_difference_in_single_precision(all_problems):
    problem, dense = all_problems[1]
    batches = [(x.float(), y) for x, y in problem.batches]
    model = mlp(5)
    model.load_state_dict(problem.model.state_dict())
    H = Hessian(model, problem.loss_fn, batches, way="difference")
    top = torch.linalg.eigh(dense).eigenvectors[:, -1]
    for v in (top, torch.ones(len(dense), dtype=torch.float64)):
        assert close((H @ v.float()).double(), dense @ v, 2e-3)


def test_single_precision(all_problems):
    problem, dense = all_problems[1]
    model = mlp(5)
    model.load_state_dict(problem.model.state_dict())
    H = Hessian(model, problem.loss_fn, problem.batches)  # float64 batches follow the weights
    assert H.dtype == torch.float32
    assert close(H.dense().double(), dense, 1e-5)


def test_a_chunk_of_vectors_at_a_time(all_problems, index):
    problem, dense = all_problems[index]
    H = Hessian(problem.model, problem.loss_fn, problem.batches, mode=problem.mode, chunk=16)
    block = torch.eye(len(dense), dtype=torch.float64)[:, :40]
    assert close(H @ block, dense @ block, 1e-10)


@pytest.fixture
def blocks_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(operator, "_BLOCKS_FORWARD_ON", ("cpu",))


def test_blocks_use_forward_over_reverse_where_it_is_faster_and_correct(all_problems, index, blocks_as_on_a_gpu):
    problem, dense = all_problems[index]
    H = Hessian(problem.model, problem.loss_fn, problem.batches, mode=problem.mode)
    block = torch.eye(len(dense), dtype=torch.float64)[:, ::7]
    assert close(H @ block, dense @ block, 1e-10)
    possible = problem.name != "squared error"  # torch cannot differentiate that forward over reverse
    assert H._blocks_by == ("forward" if possible else "auto")
    assert H.how == (
        "double backward, graphs kept as memory allows; blocks forward over reverse, 16 at a time"
        if possible
        else "double backward, graphs kept as memory allows"
    )
    assert torch.equal(H @ block[:, 0], (H @ block[:, :1]).squeeze(1))  # single vectors: on the graph


def test_forward_blocks_that_differ_from_double_backward_are_not_used(all_problems, blocks_as_on_a_gpu, monkeypatch):
    problem, dense = all_problems[0]
    right = operator.forward_over_reverse

    def wrong(objective, weights, batch):
        product, loss = right(objective, weights, batch)
        return lambda vector, batched: [2 * piece for piece in product(vector, batched)], loss

    monkeypatch.setattr(operator, "forward_over_reverse", wrong)
    H = Hessian(problem.model, problem.loss_fn, problem.batches)
    block = torch.eye(len(dense), dtype=torch.float64)[:, :5]
    assert close(H @ block, dense @ block, 1e-10)
    assert H._blocks_by == "auto"


@pytest.mark.parametrize("chunk", [None, 3, 64])
def test_forward_blocks_with_dropout_use_one_mask_and_leave_no_trace(chunk):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.4), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 10)).double()
    data = ragged(digits(30, side=4), 10, 20)
    by_graph = Hessian(model, F.cross_entropy, data, mode="train", way="graph")
    rng, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    forward = Hessian(model, F.cross_entropy, data, mode="train", way="forward", chunk=chunk)
    block = torch.eye(forward.shape[0], dtype=torch.float64)[:, ::5]
    expected = by_graph @ block
    for _ in range(2):  # the second time from kept batches
        assert close(forward @ block, expected, 1e-12)
    assert torch.equal(rng, torch.get_rng_state())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert forward.how == f"forward over reverse, {chunk or 16} at a time"


def test_out_of_memory_halves_the_chunk(all_problems, monkeypatch):
    problem, dense = all_problems[0]
    right, sizes = operator.forward_over_reverse, []

    def small_device(objective, weights, batch):
        product, loss = right(objective, weights, batch)

        def limited(vector, batched):
            sizes.append(len(vector[0]) if batched else 1)
            if sizes[-1] > 4:
                raise torch.OutOfMemoryError("out of memory")
            return product(vector, batched)

        return limited, loss

    monkeypatch.setattr(operator, "forward_over_reverse", small_device)
    H = Hessian(problem.model, problem.loss_fn, problem.batches, way="forward")
    block = torch.eye(len(dense), dtype=torch.float64)[:, :20]
    assert close(H @ block, dense @ block, 1e-10)
    assert sizes == [16, 8, 4, 4, 4, 4, 4]


def test_vectors_flat_tensors_and_blocks_agree(all_problems):
    problem, dense = all_problems[0]
    H = Hessian(problem.model, problem.loss_fn, problem.batches)
    v = torch.arange(len(dense), dtype=torch.float64)
    as_vector = H @ H.objective.vector(v)
    assert [t.shape for t in as_vector.tensors] == [p.shape for p in problem.model.parameters()]
    assert torch.equal(H.objective.flat(as_vector), H @ v)
    assert torch.equal((H @ v.unsqueeze(1)).squeeze(1), H @ v)
    assert H.matvecs == 4


def test_gauss_newton_is_jacobian_transposed_times_loss_hessian_times_jacobian():
    torch.manual_seed(1)
    x, y = digits(9, side=4)
    model = mlp(3).double()
    names, params = zip(*model.named_parameters(), strict=True)
    flat = torch.cat([p.detach().reshape(-1) for p in params])

    def outputs(flat: Tensor) -> Tensor:
        pieces = flat.split([p.numel() for p in params])
        replaced = {n: piece.reshape(p.shape) for n, piece, p in zip(names, pieces, params, strict=True)}
        return functional_call(model, replaced, (x,)).reshape(-1)

    J = torch.autograd.functional.jacobian(outputs, flat)
    B = torch.autograd.functional.hessian(lambda z: F.cross_entropy(z.reshape(9, 10), y), outputs(flat))
    ways: list[Any] = [("auto", 1), ("auto", 8), ("forward", 1), ("forward", 8)]
    for way, chunk in ways:
        G = GaussNewton(model, F.cross_entropy, ragged((x, y), 4, 5), way=way, chunk=chunk)
        assert close(G.dense(), J.T @ B @ J, 1e-12)


def test_gauss_newton_is_the_hessian_of_a_linear_model(all_problems):
    problem, dense = next((p, d) for p, d in all_problems if p.name == "unused")
    assert close(GaussNewton(problem.model, problem.loss_fn, problem.batches).dense(), dense, 1e-12)


def test_blocks_and_subsets_are_submatrices(all_problems):
    problem, dense = all_problems[0]
    H = Hessian(problem.model, problem.loss_fn, problem.batches)
    sizes = [p.numel() for p in problem.model.parameters()]
    first = sizes[0] + sizes[1]
    blocks = H.blocks()
    assert list(blocks) == ["1", "3"]
    assert close(blocks["1"].dense(), dense[:first, :first], 1e-10)
    assert close(blocks["3"].dense(), dense[first:, first:], 1e-10)
    linear = problem.model[3]
    for selection in ("3.*", ["3.weight", "3.bias"], linear, [linear.weight, linear.bias], lambda n, p: n[0] == "3"):
        found = Hessian(problem.model, problem.loss_fn, problem.batches, params=selection)
        assert close(found.dense(), dense[first:, first:], 1e-10)


def test_unused_parameters_give_zeros(all_problems):
    problem, _ = next((p, d) for p, d in all_problems if p.name == "unused")
    H = Hessian(problem.model, problem.loss_fn, problem.batches)
    assert not (H @ torch.ones(H.shape[0], dtype=torch.float64))[:5].any()


def test_scaled_is_d_a_d():
    A = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    d = torch.tensor([2.0, 5.0], dtype=torch.float64)
    assert torch.equal(Scaled(A, d) @ torch.eye(2, dtype=torch.float64), d[:, None] * A * d)


def test_graphs_beyond_the_memory_limit_are_rebuilt(all_problems):
    problem, dense = all_problems[1]
    H = Hessian(problem.model, problem.loss_fn, problem.batches, memory=1)
    block = torch.eye(len(dense), dtype=torch.float64)[:, :5]
    for _ in range(2):
        assert close(H @ block, dense @ block, 1e-10)
    assert len(H._kept["auto"]) == 1  # the first is kept: it costs no more than any product does
    kept = Hessian(problem.model, problem.loss_fn, problem.batches)
    _ = kept @ block
    assert len(kept._kept["auto"]) == 3


def test_a_model_without_second_derivative_falls_back_to_differences():
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * ctx.saved_tensors[0] * grad

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

        def forward(self, x):
            return Squared.apply(self.w * x)

    x = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    H = Hessian(Net(), lambda output, target: output.square().sum(), (x, x))
    expected = torch.diag(torch.tensor([12.0, 12 * 2.0**2 * 3.0**4], dtype=torch.float64))
    assert close(H.dense(), expected, 1e-6)
    assert H.way == "difference"
    with pytest.raises(NotImplementedError, match="twice"):
        Hessian(H.objective, way="graph").dense()


def test_weight_normalisation_has_the_right_second_derivative():
    torch.manual_seed(0)
    inner: Any = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)).double()
    model = nn.Sequential(inner, nn.Tanh(), nn.Linear(5, 3).double())
    x, y = torch.randn(10, 4, dtype=torch.float64), torch.arange(10) % 3
    size, direction = inner.parametrizations.weight.original0, inner.parametrizations.weight.original1

    def loss(size, direction):
        weight = size * direction / direction.norm(dim=1, keepdim=True)
        return F.cross_entropy(model[2](F.linear(x, weight, inner.bias).tanh()), y)

    pair = size.detach(), direction.detach()
    blocks = torch.autograd.functional.hessian(loss, pair)
    rows = [torch.cat([b.reshape(a.numel(), -1) for b in row], 1) for a, row in zip(pair, blocks, strict=True)]
    H = Hessian(model, F.cross_entropy, (x, y), params=[size, direction])
    assert close(H.dense(), torch.cat(rows), 1e-7)
    assert H.way == "difference"


def test_changed_weights_are_noticed(all_problems):
    torch.manual_seed(2)
    model, data = mlp(4).double(), digits(20, side=4)
    H = Hessian(model, F.cross_entropy, data)
    v = torch.ones(H.shape[0], dtype=torch.float64)
    before = H @ v
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    fresh = Hessian(model, F.cross_entropy, data) @ v
    assert not torch.allclose(before, fresh)
    assert torch.equal(H @ v, fresh)


@pytest.mark.parametrize("change", [lambda w: w.mul_(2), lambda w: w.neg_(), lambda w: w.view(-1)[:1].add_(1e-3)])
def test_changes_through_data_are_noticed(all_problems, change):
    problem = copy.deepcopy(all_problems[1][0])
    H = Hessian(problem.model, problem.loss_fn, problem.batches)
    H.dense()
    change(problem.model[1].weight.data)
    assert torch.allclose(H.dense(), problem.dense(), atol=1e-12)


def test_changes_of_a_buffer_and_of_the_mode_are_noticed(all_problems):
    evaluated, batchwise = (copy.deepcopy(all_problems[i][0]) for i in (5, 6))
    model = evaluated.model
    H = Hessian(model, evaluated.loss_fn, evaluated.batches, mode="as-is")
    assert torch.allclose(H.dense(), evaluated.dense(), atol=1e-12)
    model[1].running_var.data.mul_(2)
    assert torch.allclose(H.dense(), evaluated.dense(), atol=1e-12)
    model.load_state_dict(batchwise.model.state_dict())
    model.train()
    assert torch.allclose(H.dense(), batchwise.dense(), atol=1e-12)


@pytest.mark.parametrize("mode", ["eval", "batch", "train", "as-is"])
@pytest.mark.parametrize("way", ["auto", "fresh", "difference"])
def test_a_product_has_no_side_effects(mode, way):
    torch.manual_seed(3)
    model: Any = nn.Sequential(cnn(), nn.Dropout(0.3)).double()
    model.train()
    model[0][1].eval()  # a mixture of modes
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    loader_generator = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(*digits(40, side=4))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, generator=loader_generator)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]

    def random_states() -> list[Any]:
        numpy_state: Any = np.random.get_state()
        return [torch.get_rng_state(), random.getstate(), numpy_state[1].tolist(), loader_generator.get_state()]

    rngs = random_states()
    H = Hessian(model, F.cross_entropy, loader, mode=mode, way=way)
    v = torch.ones(H.shape[0], dtype=torch.float64)
    first, second = H @ v, H @ v
    H.objective.loss(0.1 * H.objective.vector(v))
    assert torch.allclose(first, second, rtol=1e-12)  # the same batches and masks each time
    assert all(torch.equal(state[k], t) for k, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(bool((p.grad == 7).all()) and p.requires_grad for p in model.parameters())
    after = random_states()
    assert torch.equal(rngs[0], after[0]) and rngs[1] == after[1] and rngs[2] == after[2]
    assert torch.equal(rngs[3], after[3])


def test_an_exception_in_the_model_leaves_no_trace():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 10)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:
                raise KeyError("boom")
            return self.inner(x.flatten(1))

    model = Fails().double().train()
    rng = torch.get_rng_state()
    H = Hessian(model, F.cross_entropy, ragged(digits(20, side=4), 10, 10), mode="eval")
    with pytest.raises(KeyError) as caught:
        _ = H @ torch.ones(H.shape[0], dtype=torch.float64)
    assert caught.value.args == ("boom",)
    assert model.training and model.inner.training
    assert torch.equal(rng, torch.get_rng_state())


def test_a_dropped_operator_frees_its_graph():
    model, data = mlp(4).double(), digits(20, side=4)
    H = Hessian(model, F.cross_entropy, data)
    _ = H @ torch.ones(H.shape[0], dtype=torch.float64)
    kept = weakref.ref(H._kept["auto"][0].product)
    assert kept() is not None
    del H
    gc.collect()
    assert kept() is None
    assert all(p.grad is None for p in model.parameters())


def test_dropout_masks_are_the_same_in_loss_gradient_and_products():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.4), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 10)).double()
    objective = Objective(model, F.cross_entropy, ragged(digits(30, side=4), 10, 20), mode="train")
    H = Hessian(objective, way="fresh")
    v = torch.linspace(-1, 1, objective.size, dtype=torch.float64)
    step = objective.vector(1e-5 * v)
    _, ahead = objective.gradient(step)
    _, behind = objective.gradient(-1.0 * step)
    assert close(objective.flat(ahead - behind) / 2e-5, H @ v, 1e-6)
    slope = (objective.loss(step) - objective.loss(-1.0 * step)) / 2e-5
    assert float(slope) == pytest.approx(float(objective.flat(objective.gradient()[1]) @ v), rel=1e-6)
    assert not torch.allclose(H @ v, Hessian(model, F.cross_entropy, digits(30, side=4)) @ v)


def test_autocast_around_it_changes_nothing():
    model, data = mlp(4), digits(20, side=4)
    H = Hessian(model, F.cross_entropy, data)
    v = torch.ones(H.shape[0])
    expected = H @ v
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(Hessian(model, F.cross_entropy, data) @ v, expected)
