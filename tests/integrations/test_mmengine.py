"""MMEngine: the lines on the page train as MMEngine does, and as the plain loop does."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import steppe
from helpers.plain_loop import METHODS, assert_same
from integrations.recipes import base, by_hand, importable_torchvision, loader, network, quiet, recipe, stand_in

pytestmark = pytest.mark.filterwarnings("ignore")  # MMEngine's own
importable_torchvision()  # MMEngine asks for its version
if pytest.importorskip("mmengine"):
    stand_in("cv2", __version__="none", setNumThreads=lambda count: None)  # 150 megabytes, for drawing

with quiet():
    from mmengine.model import BaseModel
    from mmengine.optim import OptimWrapper
    from mmengine.runner import Runner


class Net(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Any, y: Any, mode: str = "tensor") -> dict[str, Any]:
        return {"loss": F.cross_entropy(self.net(x), y)}


def train(model: Any, optimizer: Any, folder: Any, **wrapper: Any) -> Any:
    runner = Runner(
        model, work_dir=str(folder), train_dataloader=loader(), train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper=OptimWrapper(optimizer, clip_grad={"max_norm": 0.5}, **wrapper), log_level="ERROR",
        default_hooks={"checkpoint": None, "logger": None, "runtime_info": None}, experiment_name=str(id(model)),
    )  # fmt: skip
    torch.manual_seed(1)
    runner.train()
    return model.net


def test_training_is_mmengine_s_and_the_plain_loop(tmp_path, monkeypatch):
    mixin = recipe("MMEngine", METHODS["SAM"], monkeypatch)["SharpnessAware"]

    def sharp(method: steppe.Method, **wrapper: Any) -> Any:
        model = type("Sharp", (mixin, Net), {})()
        return train(model, steppe.SharpnessAware(base(model), method, model=model), tmp_path, **wrapper)

    model = Net()
    assert_same(sharp(steppe.Plain()), train(model, base(model), tmp_path), tolerance=0)
    net = sharp(METHODS["SAM"])
    assert_same(net, by_hand(METHODS["SAM"], clip=0.5), tolerance=0)
    with pytest.raises(AssertionError, match="use your own loop"):
        sharp(METHODS["SAM"], accumulative_counts=2)
