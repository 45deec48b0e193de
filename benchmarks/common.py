"""Helpers of the benchmarks: models, random batches, interleaved timing, tables, results as JSON."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steppe.support.files import whole_file

RESULTS = Path(__file__).parent / "results"
Step = Callable[[], Any]


# Models


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn5() -> nn.Sequential:
    """Four strided convolutions and a linear layer, batch norm before each weight layer, softplus between."""
    layers: list[nn.Module] = []
    channels = (3, 32, 64, 128, 256)
    for fan_in, fan_out in itertools.pairwise(channels):
        layers += [nn.BatchNorm2d(fan_in), nn.Conv2d(fan_in, fan_out, 3, stride=2, padding=1), nn.Softplus()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(256), nn.Linear(256, 10))


class Residual(nn.Module):
    """Two 3x3 convolutions with a skip connection."""

    def __init__(self, fan_in: int, fan_out: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(fan_out),
            nn.ReLU(),
            nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(fan_out),
        )
        changes = stride != 1 or fan_in != fan_out
        project = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out))
        self.around = project if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both branches."""
        return F.relu(self.body(x) + self.around(x))


def resnet18() -> nn.Sequential:
    """ResNet-18 for 32x32 images: 3x3 stem, no pooling before the first block, 11.17M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for stage, channels in enumerate((64, 128, 256, 512)):
        layers += [Residual(width, channels, 1 if stage == 0 else 2), Residual(channels, channels, 1)]
        width = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """A small encoder that classifies sequences of tokens; with dropout."""

    def __init__(self, vocabulary: int = 256, length: int = 32, width: int = 192, depth: int = 4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Class scores."""
        return self.head(self.blocks(self.tokens(tokens) + self.places).mean(dim=1))


@dataclass(frozen=True)
class Case:
    """A model, and the shape of the batches it is benchmarked with."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: dict[str, int]  # by device type
    tokens: int | None = None

    def batch_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A random batch."""
        size = (self.batch[device.type], *self.shape)
        x = torch.randn(size) if self.tokens is None else torch.randint(self.tokens, size)
        return x.to(device), torch.randint(10, size[:1]).to(device)


CASES = {
    "mlp-small": Case(lambda: mlp(64, 128, 128, 10), (64,), {"cpu": 128, "cuda": 128}),
    "mlp-large": Case(lambda: mlp(784, 1024, 512, 10), (784,), {"cpu": 128, "cuda": 128}),
    "cnn5": Case(cnn5, (3, 32, 32), {"cpu": 32, "cuda": 128}),
    "resnet18": Case(resnet18, (3, 32, 32), {"cpu": 8, "cuda": 128}),
    "transformer": Case(Transformer, (32,), {"cpu": 16, "cuda": 128}, tokens=256),
}
LARGE = {  # a billion parameters, for measurements of GPU memory
    "transformer-1b": Case(lambda: Transformer(width=2048, depth=20), (32,), {"cpu": 1, "cuda": 8}, tokens=256),
}


# Timing


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float], factor: float = 1.0) -> Spread:
        """The spread of some values, each multiplied by a factor."""
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median * factor, q1 * factor, q3 * factor)


def clock(device: torch.device) -> Callable[[], float]:
    """CPU time if one CPU thread does all the work, because other processes hardly affect it; else wall time."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def timed(step: Step, repeats: int, device: torch.device) -> float:
    """Seconds per step, including the work of the device."""
    now = clock(device)
    _wait(device)
    start = now()
    for _ in range(repeats):
        step()
    _wait(device)
    return (now() - start) / repeats


def interleaved(
    steps: Mapping[str, Step], device: torch.device, rounds: int | None, seconds: float
) -> dict[str, list[float]]:
    """Seconds per step of each contender, one sample per round.

    In each round all contenders are timed in turn, so that disturbances of the machine affect all of them alike; every
    round starts with another contender. A sample is a number of steps that is long enough for the clock. By default
    there are as many rounds as fit into ``seconds``, but at least 5 and at most 60.
    """
    for step in steps.values():  # warm-up: lazily created state, kernels, caches
        timed(step, 2, device)
    once = {name: timed(step, 1, device) for name, step in steps.items()}
    repeats = min(50, max(1, math.ceil(0.02 / min(once.values()))))
    if rounds is None:
        rounds = min(60, max(5, int(seconds / (repeats * sum(once.values())))))
    samples: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(timed(steps[name], repeats, device))
    return samples


def ratios(samples: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Sample over reference, round by round."""
    return [a / b for a, b in zip(samples, reference, strict=True)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Results


def environment(device: torch.device) -> dict[str, Any]:
    """Date, versions and hardware: what the numbers depend on besides the code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": name,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": clock(device).__name__,
        "pytorch_optimizer": _version("pytorch_optimizer"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=RESULTS.parent).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    from importlib import metadata

    if importlib.util.find_spec(package) is None:
        return None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file completely or not at all."""
    with whole_file(path) as beside:
        beside.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, with rich if it is installed. The first column is text, the others are numbers."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        print(f"\n{title}")
        for row in [columns, *rows]:
            cells = (c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            print("  ".join(cells))
        return
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def pick_device(name: str) -> torch.device:
    """The device of that name; exits with a message if it is not available."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("steppe: no CUDA device is available: use --device cpu")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
