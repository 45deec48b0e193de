"""One of two ranks: trains with each trainer and compares with the plain loop. Run by test_two_ranks.py.

Appends a line to a file for each comparison: its name and "", or what went wrong.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import steppe
from helpers.plain_loop import METHODS, assert_same, plain_loop, windows_of
from helpers.problems import batchnorm_dropout, digits, mlp, seeded

for package in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(package)

import accelerate  # noqa: E402
import lightning  # noqa: E402
import transformers  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402

from integrations.test_accelerate import Backward  # noqa: E402
from integrations.test_transformers import Classifier, SharpnessAwareTrainer, Start, images  # noqa: E402
from steppe.integrations.lightning import SharpnessAwareCallback  # noqa: E402

COMPARISONS: dict[str, Callable[[], None]] = {}
RANK = int(os.environ.get("RANK", "0"))
BATCHES, SIZE, ACCUMULATE = 14, 8, 2


def comparison(*names: str) -> Callable:
    """Register a function, once for each method."""

    def register(function: Callable) -> Callable:
        for name in names:
            COMPARISONS[f"{function.__name__}-{name}"] = functools.partial(function, *name.split("-"))
        return function

    return register


def loader(rank: int | None = None) -> DataLoader:
    """All batches, or a rank's share: every second one."""
    batches = torch.arange(BATCHES * SIZE).split(SIZE)
    indices = torch.cat(batches if rank is None else batches[rank::2])
    x, y = digits(torch.float32)
    return DataLoader(TensorDataset(x[indices], y[indices]), batch_size=SIZE)


def by_hand(net: nn.Module, name: str, kind: str = "", **settings: Any) -> None:
    """Train on this rank's batches, with plain torch."""
    model = net if kind == "sharded" else DDP(net)
    optimizer = steppe.SharpnessAware(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), METHODS[name], model=model, **settings
    )
    windows = windows_of(list(loader(RANK)), ACCUMULATE)
    plain_loop(optimizer, windows, lambda batch: F.cross_entropy(model(batch[0]), batch[1]) / ACCUMULATE, clip=0.5)


class Net(lightning.LightningModule):
    def __init__(self, sharded: bool = False):
        super().__init__()
        self.net = seeded(mlp if sharded else batchnorm_dropout, dtype=torch.float32)
        self.sharded = sharded

    def configure_model(self) -> None:
        if self.sharded and not any(isinstance(p, DTensor) for p in self.parameters()):
            shard(self.net)

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


def shard(net: Any) -> Any:
    for layer in (net[0], net[2]):
        fully_shard(layer)
    return fully_shard(net)


def fit(module: Net, strategy: Any, callback: Any, ckpt_path: Any = None, **options: Any) -> Any:
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[callback], max_epochs=options.pop("max_epochs", 1),
        accumulate_grad_batches=ACCUMULATE, gradient_clip_val=0.5, use_distributed_sampler=False, **quiet, **options,
    )  # fmt: skip
    batches = loader(RANK)
    torch.manual_seed(RANK)
    trainer.fit(module, batches, ckpt_path=ckpt_path)
    return trainer


@comparison(*METHODS, "SAM-local", "CRSAM-local")
def lightning_ddp(name: str, local: str = "") -> None:
    settings: dict[str, Any] = {"local": True} if local else {}
    module, expected = Net(), seeded(batchnorm_dropout, dtype=torch.float32)
    fit(module, DDPStrategy(process_group_backend="gloo"), SharpnessAwareCallback(METHODS[name], **settings))
    torch.manual_seed(RANK)
    by_hand(expected, name, **settings)
    assert_same(module.net, expected)


def fsdp2() -> Any:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


@comparison("SAM", "LookSAM", "CRSAM", "FrobSAM")
def lightning_fsdp2(name: str) -> None:
    module = Net(sharded=True)
    fit(
        module,
        ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        SharpnessAwareCallback(METHODS[name]),
    )
    expected = shard(seeded(mlp, dtype=torch.float32))
    by_hand(expected, name, "sharded")
    assert_same(whole(module.net), whole(expected))


def whole(net: nn.Module) -> nn.Module:
    """A copy that is not sharded."""
    copy = seeded(mlp, dtype=torch.float32)
    copy.load_state_dict({name: value.full_tensor() for name, value in net.state_dict().items()})
    return copy


@comparison("LookSAM")
def lightning_fsdp2_resumes(name: str) -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "checkpoint"
    full, first, second = Net(sharded=True), Net(sharded=True), Net(sharded=True)
    fit(full, fsdp2(), SharpnessAwareCallback(METHODS[name]), max_epochs=2)
    fit(first, fsdp2(), SharpnessAwareCallback(METHODS[name])).save_checkpoint(path)
    callback = SharpnessAwareCallback(METHODS[name])
    fit(second, fsdp2(), callback, max_epochs=2, ckpt_path=path)
    assert callback.optimizer is not None and callback.optimizer.steps == 8
    assert_same(whole(second.net), whole(full.net), tolerance=0)


@comparison("SAM", "FrobSAM", "GAM", "SAM-local")
def transformers_ddp(name: str, local: str = "") -> None:
    model, expected, start = Classifier(), Classifier(), Start()
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, ddp_backend="gloo", report_to="none", disable_tqdm=True, optim="sgd",
            train_sampling_strategy="sequential", dataloader_pin_memory=False, max_grad_norm=0.5, num_train_epochs=1,
            learning_rate=0.1, lr_scheduler_type="constant", per_device_train_batch_size=SIZE, save_strategy="no",
            gradient_accumulation_steps=ACCUMULATE,
        )  # fmt: skip
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = SharpnessAwareTrainer(
            model, args, train_dataset=images(BATCHES * SIZE), method=METHODS[name], local=bool(local),
            optimizers=(base, None), callbacks=[start],
        )  # fmt: skip
        trainer.train()
    wrapped: Any = trainer.optimizer
    assert wrapped.optimizer.steps == 4
    replica = DDP(expected)
    optimizer = steppe.SharpnessAware(
        torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), METHODS[name], model=replica, local=bool(local)
    )
    windows = [[(*b, len(w)) for b in w] for w in windows_of(list(loader(RANK)), ACCUMULATE)]
    torch.set_rng_state(start.state)
    plain_loop(optimizer, windows, lambda b: replica(b[0], b[1])["loss"] / b[2], clip=0.5)
    assert_same(model, expected)


@comparison("SAM", "FrobSAM", "SAM-local")
def accelerate_ddp(name: str, local: str = "") -> None:
    net, expected = (seeded(batchnorm_dropout, dtype=torch.float32) for _ in range(2))
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(
        net, steppe.SharpnessAware(base, METHODS[name], model=net), loader()
    )
    backward = Backward(accelerator, model, optimizer, local=bool(local))
    torch.manual_seed(RANK)
    for x, y in batches:
        with accelerator.accumulate(model):
            backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    torch.manual_seed(RANK)
    by_hand(expected, name, local=bool(local))
    assert_same(net, expected)


def main(path: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with open(f"{path}/rank{RANK}.jsonl", "a") as results:
        for name, compare in COMPARISONS.items():
            try:
                compare()
                said = ""
            except Exception:
                said = traceback.format_exc()
            print(json.dumps([name, said]), file=results, flush=True)
            if said:  # the other rank may be elsewhere by now
                sys.exit(1)
    dist.destroy_process_group()
    os._exit(0)  # FSDP2 keeps gloo's threads alive, and one that runs while Python exits can abort the process


if __name__ == "__main__":
    main(sys.argv[1])
