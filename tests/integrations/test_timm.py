"""timm: optimizers by name, and its training loop is the plain loop.

timm imports torchvision, and a torchvision that was built for another torch raises when it is imported. All that it
misses then is the schema of two operators, which nothing here uses: they are defined first.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.library import Library

import steppe
from helpers.plain_loop import METHODS, assert_same, plain_loop, windows_of
from helpers.problems import digits

LIBRARY = Library("torchvision", "FRAGMENT")
for operator in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):
        LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
try:
    import timm
except Exception as error:
    pytest.skip(f"timm cannot be imported: {error}", allow_module_level=True)

from timm.optim import create_optimizer_v2  # noqa: E402
from timm.optim._optim_factory import default_registry  # noqa: E402

from steppe.integrations.timm import SharpnessAwareScaler, register  # noqa: E402
from steppe.lab.recipe.base_names import find_base, full_name  # noqa: E402
from steppe.lab.recipe.recipe import Recipe  # noqa: E402
from steppe.lab.training.base_optimizers import make_base  # noqa: E402

BATCHES, SIZE = 7, 8


@pytest.fixture(autouse=True)
def _registry_as_it_was():
    before = dict(default_registry._optimizers)
    yield
    default_registry._optimizers = before


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = digits(torch.float32)
    pictures = F.interpolate(x.view(-1, 1, 8, 8), scale_factor=4).expand(-1, 3, -1, -1)
    return [(pictures[i * SIZE : (i + 1) * SIZE], y[i * SIZE : (i + 1) * SIZE]) for i in range(BATCHES)]


def network() -> nn.Module:
    """BatchNorm, dropout and stochastic depth: a small one of timm's own."""
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=10, drop_rate=0.2, drop_path_rate=0.2)


def test_the_factory_knows_the_names():
    added = register("sam", METHODS["SAM"])
    assert {"sam-sgd", "sam-adamw", "sam-lamb"} <= set(added) <= set(timm.optim.list_optimizers())
    assert "adahessian" in timm.optim.list_optimizers() and "sam-adahessian" not in added  # it needs a graph
    model = network()
    optimizer = create_optimizer_v2(model, "sam-adamw", lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))
    assert isinstance(optimizer, steppe.SharpnessAware) and isinstance(optimizer.base, torch.optim.AdamW)
    assert optimizer.method is METHODS["SAM"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    base = create_optimizer_v2(network(), "sam-sgd", lr=0.01).base
    assert base.param_groups[0]["nesterov"] and base.param_groups[0]["momentum"] == 0.9
    assert register("gsam", steppe.GSAM()) == [name.replace("sam-", "gsam-", 1) for name in added]
    with pytest.raises(ValueError, match="must not contain _ or -"):
        register("my_sam", METHODS["SAM"])


def test_a_batch_that_is_skipped_is_not_seen_again():
    """Its loss was not finite, say, or there was no memory for it: the next step is of the next batch alone."""

    def run(skips: bool) -> nn.Module:
        model = network().eval()  # no random numbers: the skipped batch would draw some
        optimizer = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), METHODS["SAM"])
        scaler = SharpnessAwareScaler(model, device="cpu", enabled=False)
        for i, (x, y) in enumerate(data()[:4]):
            if i % 2 and skips:
                with pytest.raises(MemoryError):
                    scaler.forward(optimizer, out_of_memory)
                scaler.forward(optimizer, lambda x=x, y=y: 50 * F.cross_entropy(model(-x), y))
                optimizer.zero_grad()
            loss = scaler.forward(optimizer, lambda x=x, y=y: F.cross_entropy(model(x), y))
            scaler(loss, optimizer)
            optimizer.zero_grad()
        return model

    def out_of_memory() -> torch.Tensor:
        raise MemoryError

    assert_same(run(True), run(False))


def test_an_interrupt_in_a_pass_leaves_the_weights_where_they_were():
    """Also with a method whose first look is away from the weights."""
    model = network()
    optimizer = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.MSAM())
    scaler = SharpnessAwareScaler(model, device="cpu", enabled=False)
    (x, y), *_ = data()
    scaler(scaler.forward(optimizer, lambda: F.cross_entropy(model(x), y)), optimizer)
    optimizer.zero_grad()
    before, moved = [p.detach().clone() for p in model.parameters()], []

    def interrupted() -> torch.Tensor:
        moved.append(not all(map(torch.equal, before, model.parameters())))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scaler.forward(optimizer, interrupted)
    assert moved == [True] and all(map(torch.equal, before, model.parameters()))


def train(model: nn.Module, optimizer: Any, scaler: Any, accumulate: int, autocast: torch.dtype | None) -> None:
    """The order of things in timm's train.py."""
    model.train()
    batches = data()
    left = len(batches) % accumulate or accumulate
    for i, (x, y) in enumerate(batches):
        size = left if i >= len(batches) - left else accumulate
        need_update = i == len(batches) - 1 or (i + 1) % accumulate == 0

        def loss_of(x: torch.Tensor = x, y: torch.Tensor = y, size: int = size) -> torch.Tensor:
            with contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast):
                return F.cross_entropy(model(x), y) / size

        loss = scaler.forward(optimizer, loss_of)
        scaler(loss, optimizer, clip_grad=0.5, parameters=model.parameters(), need_update=need_update)
        if need_update:
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "accumulate", "precision"),
    [*((name, 3, "float32") for name in METHODS), ("SAM", 1, "float32"), ("SAM", 3, "float16")],  # slow on a CPU
)
def test_training_is_the_plain_loop(name: str, accumulate: int, precision: str):
    half = precision == "float16"
    autocast = torch.float16 if half else None
    register("ours", METHODS[name])
    model, expected = network(), network()
    optimizer = create_optimizer_v2(model, "ours-momentum", lr=0.05)
    torch.manual_seed(1)
    train(model, optimizer, SharpnessAwareScaler(model, "cpu", enabled=half), accumulate, autocast)
    base = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.9)
    by_hand = steppe.SharpnessAware(base, METHODS[name], model=expected)
    expected.train()
    torch.manual_seed(1)
    plain_loop(
        by_hand,
        [[(*batch, len(window)) for batch in window] for window in windows_of(data(), accumulate)],
        lambda item: F.cross_entropy(expected(item[0]), item[1]) / item[2],
        clip=0.5,
        scaler=torch.amp.GradScaler("cpu", enabled=half),
        autocast=autocast,
    )
    assert optimizer.steps == by_hand.steps
    assert_same(model, expected)


@pytest.mark.parametrize("passed", ["tensors", "a mapping"])
def test_a_held_out_batch_is_the_second_one(passed: str):
    method = steppe.GapSAM(period=1, least=0.05)
    model, expected, batches = network(), network(), data()
    held_out: Any = batches[0]
    optimizer = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.05), method, model=model)
    if passed == "a mapping":
        held_out = {"x": held_out[0], "y": held_out[1]}
    scaler = SharpnessAwareScaler(model, "cpu", enabled=False, auxiliary=held_out)
    torch.manual_seed(1)
    model.train()
    for x, y in batches[1:]:
        if passed == "a mapping":
            loss_of = lambda b: F.cross_entropy(model(b["x"]), b["y"])  # noqa: E731
            loss = scaler.forward(optimizer, loss_of, {"x": x, "y": y})
        else:
            loss = scaler.forward(optimizer, lambda x, y: F.cross_entropy(model(x), y), x, y)
        scaler(loss, optimizer)
        optimizer.zero_grad()
    by_hand = steppe.SharpnessAware(torch.optim.SGD(expected.parameters(), lr=0.05), method, model=expected)
    torch.manual_seed(1)
    expected.train()
    windows = windows_of(batches[1:], 1)
    plain_loop(by_hand, windows, lambda b: F.cross_entropy(expected(b[0]), b[1]), held_out=batches[0])
    assert_same(model, expected)

    loss = scaler.forward(optimizer, lambda: F.cross_entropy(model(batches[0][0]), batches[0][1]))
    with pytest.raises(RuntimeError, match="pass the batch, as in forward"):
        scaler(loss, optimizer)


def test_what_cannot_be_right_says_so():
    model = network()
    scaler = SharpnessAwareScaler(model, "cpu", enabled=False)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="needs a SharpnessAware optimizer, not SGD"):
        scaler.forward(base, lambda: model(data()[0][0]).sum())
    optimizer = steppe.SharpnessAware(base, METHODS["SAM"])
    with pytest.raises(RuntimeError, match="which can compute it again"):
        scaler(model(data()[0][0]).sum(), optimizer)


def test_the_lab_finds_bases_by_their_names():
    assert full_name("lamb") == "timm.optim:Lamb" and find_base("timm.optim:Lamb") is timm.optim.Lamb
    base = make_base(Recipe(base="timm.optim:Lamb", lr=0.02, weight_decay=0.1), network().parameters())
    assert isinstance(base, timm.optim.Lamb)
    assert (base.param_groups[0]["lr"], base.param_groups[0]["weight_decay"]) == (0.02, 0.1)
