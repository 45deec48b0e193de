"""Fabric: the loop around `passes` is the plain loop, in every precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import steppe
from helpers.plain_loop import METHODS, assert_same, windows_of

lightning = pytest.importorskip("lightning")

from lightning.fabric.plugins import MixedPrecision  # noqa: E402

from integrations.lightning_problem import Net, by_hand, loader  # noqa: E402
from steppe.integrations.fabric import passes  # noqa: E402


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_fabric_is_the_plain_loop(precision: str, accumulate: int):
    half = precision == "16-mixed"
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0)) if half else None
    fabric = lightning.Fabric(
        accelerator="cpu", devices=1, **({"plugins": plugin} if half else {"precision": precision})
    )
    net = Net().net
    base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(net, steppe.SharpnessAware(base, METHODS["CRSAM"], model=net))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(base, 10)
    torch.manual_seed(1)
    for window in windows_of(list(loader()), accumulate):
        for _ in passes(fabric, optimizer):
            for i, (x, y) in enumerate(window):
                with fabric.no_backward_sync(model, enabled=i < len(window) - 1):
                    fabric.backward(F.cross_entropy(model(x), y) / accumulate)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        scheduler.step()
    autocast = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[precision]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if half else None
    expected, _ = by_hand(METHODS["CRSAM"], accumulate, clip=0.5, autocast=autocast, scaler=scaler)
    assert_same(net, expected.net)
