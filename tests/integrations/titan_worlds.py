"""Trains with torchtitan's own trainer on a CPU, on one rank and on two; ``python titan_worlds.py FOLDER``.

torchtitan asks for an accelerator when it is imported, and measures its memory. Here it is told that there is a CPU.
Importing it takes seconds, so it is imported once, and every rank is a copy of that process.
"""

# pyright: reportMissingImports=false
# ruff: noqa: E402
from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

# Kernels for experts on several GPUs, which need triton. Nothing here calls them.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
    from torchtitan.components import metrics

from torchtitan import trainer as titan
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

import steppe

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from torchtitan_sam import SharpnessAwareTrainer

STEPS, WORDS, LENGTH, ROWS = 3, 2048, 16, 8  # rows of a step's batch, over all ranks and micro-batches


class NoMemory:
    """In the place of a GPU's memory."""

    device_name = "CPU"
    get_peak_stats = mock.MagicMock(return_value=SimpleNamespace(**dict.fromkeys(metrics.DeviceMemStats._fields, 0)))
    reset_peak_stats = staticmethod(lambda: None)


metrics.build_device_memory_monitor = NoMemory
titan.dist_utils.set_pg_timeouts = lambda **_: None  # asks for the number of the rank's GPU


class Characters(BaseTokenizer):
    """A tokenizer of the kind that the trainer asks for."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str):
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return WORDS


class Text(BaseDataLoader):
    """This project's license, in rows: the same rows make a step on one rank and on two."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, tokenizer: Any, local_batch_size: int, **_):
        tokens = torch.tensor(tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text()))
        rows = tokens[: STEPS * ROWS * (LENGTH + 1)].view(STEPS, ROWS, LENGTH + 1)
        self.batches = [part for step in rows for part in step.chunk(dp_world_size)[dp_rank].split(local_batch_size)]
        self.position = 0

    def __iter__(self):
        for batch in self.batches[self.position :]:
            self.position += 1
            yield {"input": batch[:, :-1].contiguous()}, batch[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def settings(folder: Path, steps: int = STEPS, save: bool = False, **parallelism: Any) -> dict[str, Any]:
    """A llama of two layers, micro-batches of two rows."""
    spec = model_registry("debugmodel")
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return {
        "model_spec": spec,
        "dump_folder": str(folder),
        "tokenizer": Characters.Config(),
        "dataloader": Text.Config(),
        "optimizer": default_adamw(lr=1e-2, eps=1e-3),
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=2),
        "loss": CrossEntropyLoss.Config(),
        "metrics": metrics.MetricsProcessor.Config(log_freq=1),
        "checkpoint": CheckpointManager.Config(enable=save, interval=2, last_save_model_only=False),
        "activation_checkpoint": None,
        # Its default needs a newer torch.
        "parallelism": ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),
        "training": TrainingConfig(
            local_batch_size=2, global_batch_size=ROWS, seq_len=LENGTH, max_norm=0.5, steps=steps,
            disable_cuda_graphs=True, mixed_precision_param="float32",
        ),
    }  # fmt: skip


def prepare(trainer: titan.Trainer) -> None:
    """The same weights in every world: each parameter's are drawn by its name. And no sums that gloo does not have."""
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        for name, p in part.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            drawn = torch.randn(p.shape, generator=generator) * 0.02 + ("norm" in name)
            p.detach().copy_(distribute_tensor(drawn, p.device_mesh, p.placements))

    if trainer.parallel_dims.pp_enabled:
        trainer.pp_schedule.step = functools.partial(step_of_lists, trainer.pp_schedule.step)


def step_of_lists(step: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **settings: Any) -> None:
    """A schedule's step on micro-batches, which torch 2.13 splits itself."""
    assert not any(kwarg_mbs)
    words = () if arg_mbs is None else (torch.cat([words for (words,) in arg_mbs]),)
    step(*words, target=None if target_mbs is None else torch.cat(target_mbs), **settings)


def weights(trainer: titan.Trainer) -> dict[str, Tensor]:
    """Whole, not in shards."""
    return {name: p.detach().full_tensor() for part in trainer.model_parts for name, p in part.named_parameters()}


def trained(method: steppe.Method | None, **options: Any) -> dict[str, Any]:
    """torchtitan's own run, or the recipe's: weights, and what was logged at each step."""
    chosen = settings(**options)
    config = titan.Trainer.Config(**chosen) if method is None else SharpnessAwareTrainer.Config(**chosen, method=method)
    trainer = config.build()
    prepare(trainer)
    with mock.patch.object(trainer.metrics_processor, "log") as log, mock.patch("time.sleep"):
        trainer.train()
    logged = [(call.args[1:], call.kwargs["extra_metrics"]["n_tokens_seen"]) for call in log.call_args_list]
    result = {"weights": weights(trainer), "logged": logged}
    trainer.close()
    return result


def by_hand(folder: Path) -> dict[str, Any]:
    """SAM as the paper writes it, on whole batches, with the trainer's model, clipping, AdamW and schedule."""
    trainer = titan.Trainer.Config(**settings(folder)).build()
    prepare(trainer)
    (model,), base = trainer.model_parts, trainer.optimizers
    params, batches = list(model.parameters()), list(trainer.dataloader)
    size = len(batches) // STEPS

    def gradient(rows: list[Any]) -> tuple[float, Tensor]:
        base.zero_grad()
        words, following = torch.cat([row["input"] for row, _ in rows]), torch.cat([labels for _, labels in rows])
        loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten())
        loss.backward()
        return loss.item(), torch.stack([p.grad.full_tensor().square().sum() for p in params]).sum().sqrt()

    losses = []
    for step in range(STEPS):
        rows = batches[step * size : (step + 1) * size]
        before = [p.detach().clone() for p in params]
        loss, norm = gradient(rows)
        losses.append(loss)
        with torch.no_grad():
            for p in params:
                p.add_(SAM.rho * p.grad / norm)
        _, norm = gradient(rows)
        with torch.no_grad():
            for p, start in zip(params, before, strict=True):
                p.copy_(start)
                p.grad.mul_(min(1.0, 0.5 / (norm.item() + 1e-6)))
        base.step()
        trainer.lr_schedulers.step()
    return {"weights": weights(trainer), "losses": losses}


def refusal(method: steppe.Method, folder: Path) -> str:
    """What a trainer with this method says."""
    try:
        SharpnessAwareTrainer.Config(**settings(folder), method=method).build()
    except ValueError as error:
        return str(error)
    return ""


SAM = steppe.SAM(rho=0.05)
METHODS = {"torchtitan": None, "Plain": steppe.Plain(), "SAM": SAM, "LookSAM": steppe.LookSAM(rho=0.05, k=3)}
RANKS = {
    "by hand": 1,
    "command line": 1,
    "refused": 1,
    "LookSAM FSDP2": 2,
    "LookSAM FSDP2, interrupted": 2,
    "LookSAM FSDP2, resumed": 2,
} | {
    f"{method} {where}": ranks
    for where, ranks in (("alone", 1), ("FSDP2", 2), ("pipeline", 2))
    for method in ("torchtitan", "Plain", "SAM")
}


def world(name: str, folder: Path) -> dict[str, Any]:
    """What a rank does in the world of this name."""
    if name == "by hand":
        return by_hand(folder)
    if name == "command line":
        options = ["--module=torchtitan_sam", "--config=llama3_debugmodel_sam", "--training.steps=7"]
        config = ConfigManager().parse_args(options)
        return {"method": str(config.method), "steps": config.training.steps, "builds": config._owner.__name__}
    if name == "refused":
        return {"said": [refusal(method, folder) for method in (steppe.FrobSAM(), steppe.Every(2, steppe.GAM()))]}
    if "FSDP2, " in name:  # two worlds, one after the other
        return trained(METHODS["LookSAM"], folder=folder.parent, steps=2 if "interrupted" in name else STEPS, save=True)
    parallelism = {"pipeline_parallel_degree": 2} if "pipeline" in name else {}
    return trained(METHODS[name.split()[0]], folder=folder, **parallelism)


def rank(name: str, number: int, folder: Path, port: int) -> int:
    """A rank's life; its exit status."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS[name])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    try:
        torch.save(world(name, folder), folder / f"{name} {number}.pt")
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(folder: Path) -> str | None:
    for name, ranks in RANKS.items():
        here = folder / name
        here.mkdir()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        children: list[int] = []
        for number in range(ranks):
            if (child := os.fork()) == 0:
                status = rank(name, number, here, store.port)
                sys.stderr.flush()
                os._exit(status)
            children.append(child)
        while children:
            child, status = os.wait()
            children.remove(child)
            if status != 0:
                for other in children:  # they wait for it
                    os.kill(other, signal.SIGKILL)
                return f"{name} failed"
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
