"""The vector type against a loop over flat float64 tensors."""

from __future__ import annotations

import copy
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steppe.engine.random_vectors
from steppe import Space, Vector, reject, unit
from steppe.vector import Each

SHAPES = [(3, 2), (), (0, 4), (5,), (1, 1, 2)]


def vectors(seed: int, dtype: torch.dtype = torch.float64, count: int = 2) -> list[Vector]:
    generator = torch.Generator().manual_seed(seed)
    space = Space([torch.zeros(shape, dtype=dtype) for shape in SHAPES])
    draws = [[torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES] for _ in range(count)]
    return [Vector(tensors, space) for tensors in draws]


def flat(v: Vector) -> torch.Tensor:
    return torch.cat([t.double().reshape(-1) for t in v.tensors])


UNARY = {
    "negative": (lambda v: -v, lambda x: -x),
    "abs": (Vector.abs, torch.abs),
    "square": (lambda v: v**2, torch.square),
    "sqrt": (lambda v: v.abs().sqrt(), lambda x: x.abs().sqrt()),
    "twice": (lambda v: 2 * v, lambda x: 2 * x),
    "third": (lambda v: v / 3, lambda x: x / 3),
    "tensor factor": (lambda v: torch.tensor(0.5, dtype=torch.float64) * v, lambda x: 0.5 * x),
    "two factors": (lambda v: 3 * (v * torch.tensor(0.5, dtype=torch.float64)), lambda x: 1.5 * x),
    "shift": (lambda v: v + 1.5, lambda x: x + 1.5),
    "unit": (unit, lambda x: x / x.norm()),
    "map": (lambda v: v.map(torch.tanh), torch.tanh),
    "clone": (Vector.clone, torch.clone),
}
BINARY = {
    "plus": (lambda a, b: a + b, lambda x, y: x + y),
    "minus": (lambda a, b: a - b, lambda x, y: x - y),
    "times": (lambda a, b: a * b, lambda x, y: x * y),
    "over": (lambda a, b: a / b, lambda x, y: x / y),
    "scaled sum": (lambda a, b: 2 * a + 3 * b, lambda x, y: 2 * x + 3 * y),
    "reject": (reject, lambda x, y: x - (x @ y) / (y @ y) * y),
}


@pytest.mark.parametrize("name", UNARY)
@given(seed=st.integers(0, 2**31))
def test_unary(name, seed):
    ours, theirs = UNARY[name]
    (v,) = vectors(seed, count=1)
    torch.testing.assert_close(flat(ours(v)), theirs(flat(v)), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("name", BINARY)
@given(seed=st.integers(0, 2**31))
def test_binary(name, seed):
    ours, theirs = BINARY[name]
    a, b = vectors(seed)
    torch.testing.assert_close(flat(ours(a, b)), theirs(flat(a), flat(b)), rtol=1e-10, atol=1e-10)


@given(seed=st.integers(0, 2**31), factor=st.floats(-3, 3))
def test_reductions(seed, factor):
    a, b = vectors(seed)
    torch.testing.assert_close((factor * a) @ (2 * b), 2 * factor * flat(a) @ flat(b), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close((factor * a).norm(), abs(factor) * flat(a).norm())
    torch.testing.assert_close((a * torch.tensor(factor)).norm(), flat(a).norm() * abs(torch.tensor(factor)))


def test_nothing_is_changed_by_arithmetic():
    a, b = vectors(0)
    before = [t.clone() for t in (*a.tensors, *b.tensors)]
    for _, (op, _) in UNARY.items():
        op(a)
    for _, (op, _) in BINARY.items():
        op(a, b)
    assert all(torch.equal(x, y) for x, y in zip(before, (*a.tensors, *b.tensors), strict=True))


@pytest.mark.parametrize("factor", [None, 0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_add_in_place(factor, dtype):
    a, b = vectors(0, dtype)
    expected = flat(a) + (1 if factor is None else 0.5) * flat(b)
    tensors = a.tensors
    a.add_(b if factor is None else factor * b)
    assert a.tensors is tensors
    torch.testing.assert_close(flat(a), expected, rtol=1e-6, atol=1e-7)


def test_multiply_in_place_on_two_devices():
    """A loss scale is a number on one of them."""
    v = Vector([torch.ones(2), torch.ones(2, device="meta")])
    v.mul_(torch.tensor(3.0))
    assert v.tensors[0].tolist() == [3, 3] and v.tensors[1].is_meta


def test_add_in_place_with_any_memory_layout():
    """The fused kernel reads memory linearly: it may only get tensors of the same layout without gaps."""
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    turned = image.contiguous(memory_format=torch.channels_last)
    layouts = [
        (torch.ones(3, 2), torch.arange(6.0).reshape(3, 2)),
        (torch.ones(2, 3).T, torch.arange(6.0).reshape(3, 2)),
        (torch.ones(2, 3).T, torch.arange(6.0).reshape(2, 3).T),
        (torch.ones(3, 4)[:, :2], torch.arange(12.0).reshape(3, 4)[:, :2]),
        (torch.ones(3, 2), torch.tensor(2.0).expand(3, 2)),
        (torch.ones_like(image), turned),
        (torch.ones_like(turned), image),
        (torch.ones_like(turned), turned),
        (torch.ones(3, dtype=torch.float64), torch.arange(3.0, dtype=torch.float64)),
        (torch.ones(3, dtype=torch.bfloat16), torch.arange(3.0).bfloat16()),
    ]
    wholes = [target._base if target._base is not None else target for target, _ in layouts]
    expected = [target + 0.5 * offset for target, offset in layouts]
    sums = [whole.sum() + (e - t).sum() for whole, e, (t, _) in zip(wholes, expected, layouts, strict=True)]
    versions = [target._version for target, _ in layouts]
    weights = Vector([target for target, _ in layouts])
    weights.add_(torch.tensor(0.5) * Vector([offset for _, offset in layouts], weights.space))
    for target, value in zip(weights.tensors, expected, strict=True):
        assert torch.equal(target, value)
    assert [whole.sum() for whole in wholes] == sums  # the gaps between entries are not written to
    assert all(new.grad_fn is None and new._version > old for new, old in zip(weights.tensors, versions, strict=True))


def test_an_offset_of_another_shape_is_refused():
    weights = Vector([torch.zeros(2, 3)])
    with pytest.raises(RuntimeError, match="size"):
        weights.add_(torch.tensor(0.5) * Vector([torch.zeros(3, 2)], weights.space))


@pytest.mark.parametrize("size", [1 << 10, (1 << 18) + 1])
def test_reductions_of_small_and_large_tensors(size):
    """Small tensors are concatenated: none is lost or counted twice."""
    tensors = [torch.full((size,), 2.0), torch.full((3, 1), 3.0), torch.empty(0), torch.full((2, 2), 4.0).T]
    v = Vector(tensors)
    assert v @ v == 4 * size + 27 + 64
    torch.testing.assert_close(v.norm(), torch.tensor(4.0 * size + 27 + 64).sqrt())


def test_a_long_sum_does_not_keep_its_terms():
    """A loop that adds a vector in each step must not keep all these vectors."""
    space = Space([torch.zeros(3)])
    walk, expected = space.zeros(), torch.zeros(3)
    seen, step = [], None
    for i in range(10):
        step = Vector([torch.full((3,), float(i))], space)
        seen.append(weakref.ref(step.tensors[0]))
        walk, expected = 0.5 * walk + step, 0.5 * expected + i
    del step
    assert sum(ref() is not None for ref in seen) <= 4
    assert torch.equal(flat(walk), expected.double())


def test_a_factor_for_each_parameter():
    (v,) = vectors(0, count=1)
    scaled = Each([1.0, 2.0, 3.0, 4.0, 5.0]) * v
    for i, (a, b) in enumerate(zip(scaled.tensors, v.tensors, strict=True)):
        torch.testing.assert_close(a, (i + 1) * b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_reduces_in_float32(dtype):
    big = Vector([torch.full((1000,), 300.0, dtype=dtype)])  # squares and sums leave float16's range
    assert big.norm().dtype == torch.float32
    torch.testing.assert_close(big.norm(), torch.tensor(300.0 * 1000**0.5))
    torch.testing.assert_close(big @ big, torch.tensor(300.0**2 * 1000))
    assert unit(big).tensors[0].dtype == dtype
    torch.testing.assert_close(unit(big).norm(), torch.tensor(1.0), rtol=2e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_unit_vector_of_zero_is_zero(dtype):
    zero = Vector([torch.zeros(3, dtype=dtype), torch.zeros((), dtype=dtype)])
    assert all(torch.equal(t, torch.zeros_like(t)) and t.dtype == dtype for t in unit(zero).tensors)


def test_several_dtypes_in_one_vector():
    v = Vector([torch.ones(3, dtype=torch.bfloat16), torch.ones(6, dtype=torch.float32)])
    torch.testing.assert_close(v.norm(), torch.tensor(3.0))
    assert [t.dtype for t in (v * torch.tensor(0.5)).tensors] == [torch.bfloat16, torch.float32]


def test_perturbed_is_zero_on_weights_that_may_not_move():
    tensors = [torch.ones(2), torch.ones(3)]
    v = 2 * Vector(tensors, Space(tensors, perturbed=[True, False]))
    assert flat(v.perturbed()).tolist() == [2, 2, 0, 0, 0]
    assert flat(v).tolist() == [2, 2, 2, 2, 2]


def test_missing_gradients_are_zeros():
    params = [torch.ones(2), torch.ones(3)]
    assert flat(Space(params).vector([None, 2 * params[1]])).tolist() == [0, 0, 2, 2, 2]


def test_deep_copies_and_pickles_are_equal_vectors():
    (v,) = vectors(0, count=1)
    for twin in (copy.deepcopy(v), pickle.loads(pickle.dumps(v))):
        assert torch.equal(flat(twin), flat(v)) and twin.space is not v.space


def test_only_numbers_scale_a_vector():
    (v,) = vectors(0, count=1)
    with pytest.raises(TypeError, match="a number, a 0-d tensor or a Vector"):
        v * torch.ones(3)  # pyright: ignore[reportUnusedExpression]
    with pytest.raises(TypeError, match="a number"):
        v * "2"  # pyright: ignore
    assert repr(v) == "Vector(5 tensors, 14 entries)"


@pytest.mark.cuda
def test_several_devices():
    v = Vector([torch.ones(3), torch.ones(6, device="cuda")])
    assert float(v.norm()) == 3
    assert [t.device.type for t in (v * torch.tensor(0.5)).tensors] == ["cpu", "cuda"]
    assert float((v * torch.tensor(2.0)) @ v) == 18


def test_draws_on_two_devices_are_not_the_same_numbers(monkeypatch):
    """Two names of the CPU stand for two devices of one kind."""
    first, second = params = [torch.zeros(3), torch.zeros(3)]
    device = {id(first): torch.device("cpu"), id(second): torch.device("cpu", 0)}
    alone = steppe.engine.random_vectors.Draws(Space([first]), seed=0, step=0).normal().tensors
    monkeypatch.setattr(steppe.engine.random_vectors, "local", lambda t: SimpleNamespace(device=device[id(t)]))
    drawn = steppe.engine.random_vectors.Draws(Space(params), seed=0, step=0).normal().tensors
    assert torch.equal(drawn[0], alone[0])
    assert not (drawn[1] == drawn[0]).any()
