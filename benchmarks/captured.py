"""The speed-up from recording a whole step as one CUDA graph.

    python benchmarks/captured.py [--models mlp-3 cnn-5 ...] [--seconds S] [--results FOLDER]

Random images, on the small nets of Generalization Aware Minimization (batch 100) and on ResNet-18 (batch 128).
Measured: a plain step, SAM and GAM, eager and captured; SAMPa and TraceSAM, captured, with their looks in parallel and
in sequence; SAM by the fastest other library; five captured SAM steps at once on five streams; and a straightforward
GAM that differentiates through its whole step. All are timed in alternation in one run. The results are medians and
quartiles of milliseconds, and the claimed ratios with their targets.

There are also two lower bounds: the time of two passes' multiplications at the rate that this device reaches on large
matrices, and the time of reading and writing every operation's tensors at the rate of a large copy (fused kernels and
the cache save some of that).
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from charts import Chart, Page, Record, device_of
from common import RESULTS, Spread, Step, environment, interleaved, pick_device, ratios, show_table, write_json
from contenders import peers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import steppe
from steppe.lab.models import build
from steppe.method import HERE, Look, Method, ascent

SEEDS = 5
BATCH = {"resnet-18": 128}
_OVER_PEER = {"mlp-3": 8.0, "cnn-5": 5.0, "cnn-14": 2.4, "resnet-18": 1.5}
# (numerator, denominator, comparison, target ratio by model)
TARGETS: list[tuple[str, str, str, dict[str, float]]] = [
    ("steppe SAM, eager", "two bare passes", "<=", {"resnet-18": 1.05}),
    ("SAM, captured", "base, captured", "<=", {"mlp-3": 2.3, "cnn-5": 2.1, "cnn-14": 2.1, "resnet-18": 2.1}),
    ("best peer's SAM, eager", "SAM, captured", ">=", _OVER_PEER),
    ("best peer's SAM, eager", "SAM, captured and compiled", ">=", _OVER_PEER),
    ("best peer's SAM, eager", "SAM, captured, per seed", ">=", {"mlp-3": 20, "cnn-5": 18, "cnn-14": 5}),
    ("SAMPa, captured", "base, captured", "<=", {"mlp-3": 1.3, "cnn-5": 1.3}),
    ("GAM, captured", "base, captured", "<=", dict.fromkeys(("mlp-3", "cnn-5", "cnn-14", "resnet-18"), 7.0)),
    ("GAM through its step, eager", "GAM, captured", ">=", {"cnn-5": 7}),
]


@dataclass(frozen=True)
class Ring(Method):
    """A method of k looks and little else, to measure what a look costs."""

    k: int = 2
    cost = 0  # not fixed: it is k

    def looks(self, ctx):
        """Look k times; step along the last."""
        seen = yield HERE
        for _ in range(self.k - 1):
            seen = yield Look(0.01 * ascent(seen.grad))
        return seen.grad


def through_the_step(model: nn.Module, loss: Callable[[], Tensor], other: Callable[[], Tensor]) -> Step:
    """A straightforward GAM with T = 2: double backward through the whole step."""
    params = list(model.parameters())
    base = torch.optim.Adam(params, lr=1e-3)
    gamma = torch.zeros(2, device=params[0].device, requires_grad=True)
    tune = torch.optim.Adam([gamma], lr=1e-3)
    eps = 1e-3

    def grads(f: Callable[[], Tensor], at: dict[str, Tensor]) -> tuple[Tensor, ...]:
        with torch.nn.utils.stateless._reparametrize_module(model, at):
            value = f()
        return torch.autograd.grad(value, list(at.values()), create_graph=True)

    names = [name for name, _ in model.named_parameters()]

    def step() -> None:
        here: dict[str, Tensor] = dict(zip(names, params, strict=True))
        d1 = grads(loss, here)
        moved = {n: p + eps * d for n, p, d in zip(names, params, d1, strict=True)}
        d2 = [(a - b) / eps for a, b in zip(grads(loss, moved), d1, strict=True)]
        at = {n: p + gamma[0] * a + gamma[1] * b for n, p, a, b in zip(names, params, d1, d2, strict=True)}
        g, g_bar = grads(loss, at), grads(other, at)
        discrepancy = -torch.stack([(a * b).sum() for a, b in zip(g, g_bar, strict=True)]).sum()
        (gamma.grad,) = torch.autograd.grad(discrepancy, [gamma])
        tune.step()
        for p, d in zip(params, g, strict=True):
            p.grad = d.detach()
        base.step()

    return step


class Bench:
    """All contenders on one model."""

    def __init__(self, name: str, device: torch.device):
        torch.manual_seed(0)
        self.name, self.device, self.batch = name, device, BATCH.get(name, 100)
        self.start = build(name, (3, 32, 32), 10).to(device)
        self.x, self.x2 = (torch.rand(self.batch, 3, 32, 32, device=device) for _ in range(2))
        self.y, self.y2 = (torch.randint(10, (self.batch,), device=device) for _ in range(2))

    def fast(self, compiled: bool) -> tuple[nn.Module, Callable[..., Tensor]]:
        """A copy of the model in channels-last format, and its loss."""
        model = copy.deepcopy(self.start)
        for p in model.parameters():
            if p.dim() == 4:
                p.data = p.data.contiguous(memory_format=torch.channels_last)
        called = torch.compile(model) if compiled else model
        return model, lambda x, y: F.cross_entropy(called(x), y)

    def step_of(self, method: Method, captured: bool, compiled: bool = False, beside: bool = True) -> Step:
        """A step with steppe; `beside`: run independent looks in parallel."""
        model, loss = self.fast(compiled)
        opt = steppe.SharpnessAware(torch.optim.Adam(model.parameters(), lr=1e-3, fused=True), method, model=model)
        batch = (self.x.contiguous(memory_format=torch.channels_last), self.y)
        other = (self.x2.contiguous(memory_format=torch.channels_last), self.y2)
        second: dict[str, Any] = {"auxiliary": other} if "auxiliary" in method.needs else {}
        if captured:
            step = steppe.capture(loss, opt, side_by_side=beside)
            for _ in range(4):
                step(*batch, **second)
            if not step.how.startswith("replayed"):
                raise SystemExit(step.how)
            return lambda: step(*batch, **second)
        closures = {name: lambda b=b: loss(*b) for name, b in second.items()}
        return lambda: opt.step(lambda: loss(*batch), **closures)

    def at_once(self, method: Method, seeds: int, compiled: bool) -> Step:
        """One step of several models, each on a stream of its own."""
        streams = [torch.cuda.Stream(self.device) for _ in range(seeds)]
        steps = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                steps.append(self.step_of(method, True, compiled))
        torch.cuda.synchronize()

        def all_of_them() -> None:
            for stream, step in zip(streams, steps, strict=True):
                with torch.cuda.stream(stream):
                    step()

        return all_of_them

    def bare(self, passes: int) -> Step:
        """The given number of passes and the base optimizer's step, without a method."""
        model, loss = self.fast(False)
        base = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        x = self.x.contiguous(memory_format=torch.channels_last)

        def step() -> None:
            for _ in range(passes):
                base.zero_grad()
                loss(x, self.y).backward()
            base.step()

        return step

    def peers(self) -> dict[str, Step]:
        """SAM by each installed other library, as its users run it: SGD, eager, the default memory layout."""
        steps = {}
        for name, make in peers("SAM").items():
            model = copy.deepcopy(self.start)
            try:
                steps[f"{name}'s SAM, eager"] = make(model, lambda model=model: F.cross_entropy(model(self.x), self.y))
            except ImportError:
                print(f"not installed, left out: {name}")
        return steps

    def contenders(self) -> dict[str, Step]:
        """All ways to step, by name."""
        sam, gam, sampa = steppe.SAM(), steppe.GAM(), steppe.SAMPa()
        model = copy.deepcopy(self.start)
        return {
            "base, eager": self.bare(1),
            "two bare passes": self.bare(2),
            "steppe SAM, eager": self.step_of(sam, False),
            "steppe GAM, eager": self.step_of(gam, False),
            "base, captured": self.step_of(steppe.Plain(), True),
            "SAM, captured": self.step_of(sam, True),
            "GAM, captured": self.step_of(gam, True),
            "SAMPa, captured": self.step_of(sampa, True),
            "SAMPa, captured, looks in turn": self.step_of(sampa, True, beside=False),
            "TraceSAM n = 4, captured": self.step_of(steppe.TraceSAM(n=4), True),
            "TraceSAM n = 4, captured, looks in turn": self.step_of(steppe.TraceSAM(n=4), True, beside=False),
            "SAM, captured and compiled": self.step_of(sam, True, True),
            f"SAM, captured, {SEEDS} at once": self.at_once(sam, SEEDS, False),
            f"SAM, captured and compiled, {SEEDS} at once": self.at_once(sam, SEEDS, True),
            "GAM through its step, eager": through_the_step(
                model, lambda: F.cross_entropy(model(self.x), self.y), lambda: F.cross_entropy(model(self.x2), self.y2)
            ),
            **self.peers(),
        }

    def work(self) -> tuple[float, float]:
        """Floating-point operations, and bytes read and written, of one forward and backward pass."""
        _, loss = self.fast(False)
        with FlopCounterMode(display=False) as counter:
            loss(self.x, self.y).backward()
        with Traffic() as traffic:
            loss(self.x, self.y).backward()
        return counter.get_total_flops(), traffic.bytes


class Traffic(TorchDispatchMode):
    """Counts the bytes of the tensors that operations read and write; what is changed in place is read and written."""

    NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
    ONLY_WRITE = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation; views and new memory move nothing."""
        out, name = func(*args, **(kwargs or {})), func._schema.name.partition("::")[2]
        if not func.is_view and name not in self.NOTHING:
            self.bytes += sum({t.data_ptr(): t.nbytes for t in self._tensors((args, kwargs, out))}.values())
            if name not in self.ONLY_WRITE:
                # Fused optimizers would write to the gradients only if they had to unscale them.
                named = zip(args, func._schema.arguments, strict=False)
                written = [a for a, known in named if known.is_write and known.name != "grads"]
                self.bytes += sum({t.data_ptr(): t.nbytes for t in self._tensors(written)}.values())
        return out

    @staticmethod
    def _tensors(of: Any) -> list[Tensor]:
        return [t for t in tree_leaves(of) if isinstance(t, Tensor)]


def derived(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """The measured times, with those that the claims also compare: of the fastest other library, and per seed."""
    best = min((n for n in times if n.endswith("'s SAM, eager")), key=lambda n: statistics.median(times[n]))
    per_seed = min((n for n in times if n.endswith("at once")), key=lambda n: statistics.median(times[n]))
    return {
        **times,
        "best peer's SAM, eager": times[best],
        "SAM, captured, per seed": [t / SEEDS for t in times[per_seed]],
    }


def claims(model: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for what, over, sign, targets in TARGETS:
        if model in targets and what in times and over in times:
            ratio = Spread.of(ratios(times[what], times[over]))
            met = ratio.median <= targets[model] if sign == "<=" else ratio.median >= targets[model]
            claim = {"what": what, "over": over, "ratio": asdict(ratio), "target": f"{sign} {targets[model]}"}
            rows.append({"model": model, **claim, "met": met})
    return rows


def matmul_rate(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second on large matrices, in the precision of this run."""
    a = torch.randn(8192, 8192, device=device, dtype=dtype)
    seconds = interleaved({"matmul": lambda: a @ a}, device, 10, 1.0)["matmul"]
    return 2 * 8192**3 / sorted(seconds)[len(seconds) // 2]


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    a = torch.zeros(1 << 28, device=device)
    b = torch.empty_like(a)
    seconds = interleaved({"copy": lambda: b.copy_(a)}, device, 10, 1.0)["copy"]
    return 2 * a.numel() * a.element_size() / sorted(seconds)[len(seconds) // 2]


# The documentation's page

CEILINGS = {"ceiling_of_two_passes_ms": "multiplications alone", "memory_of_two_passes_ms": "memory alone"}


def milliseconds(record: Record) -> dict[str, dict[str, float]]:
    """Medians by model and contender; the ceilings are in brackets."""
    times: dict[str, dict[str, float]] = {}
    for r in record["results"]:
        of_model = times.setdefault(r["model"], {})
        if "contender" in r:
            of_model[r["contender"]] = r["milliseconds"]["median"]
        else:
            of_model |= {f"(two passes' {text})": r[key] for key, text in CEILINGS.items()}
    return times


def charts(record: Record, name: str) -> Iterator[Chart]:
    """Milliseconds of a step, eager and captured."""
    for model, times in milliseconds(record).items():
        bars = {who: {"milliseconds": t} for who, t in times.items()}
        title = f"{model}, {device_of(record)}"
        yield Chart(f"{name}-{model}", title, "milliseconds per step", bars, logarithmic=True)
    each = {f"{r['looks']}": {"a look": r["milliseconds"]["median"] / r["looks"]} for r in record["looks"]}
    title = f"{record['looks'][0]['model']}, by looks a step, {device_of(record)}"
    yield Chart(f"{name}-looks", title, "milliseconds per look", each)


def summary(record: Record, name: str) -> Iterator[Chart]:
    """SAM by the best peer, and captured."""
    bars: dict[str, dict[str, float]] = {}
    for model, times in milliseconds(record).items():
        peer = min(t for who, t in times.items() if who.endswith("'s SAM, eager"))
        bars[model] = {"SAM, captured": times["SAM, captured"], "best peer's SAM, eager": peer}
        bars[model]["two passes' multiplications alone"] = times["(two passes' multiplications alone)"]
    yield Chart(f"{name}-summary", f"A SAM step, {device_of(record)}", "milliseconds per step", bars, logarithmic=True)


def claims_table(record: Record) -> list[str]:
    """The targets, and whether this record reaches them."""
    lines = ["| ratio | target | measured (quartiles) | reached |", "|---|---|---|---|"]
    for c in record["claims"]:
        ratio, q1, q3 = (f"{c['ratio'][key]:.3f}" for key in ("median", "q1", "q3"))
        met = "yes" if c["met"] else "**no**"
        lines.append(f"| {c['model']}: {c['what']} / {c['over']} | {c['target']} | {ratio} ({q1} to {q3}) | {met} |")
    return lines


PAGE = Page(
    "Captured steps",
    "What recording a whole step as one CUDA graph (`steppe.capture`) saves. Medians, measured in alternation in one "
    "run. The bars in brackets are lower limits: the time of two passes' arithmetic, and of their memory traffic.",
    charts,
    place=2,
    text=claims_table,
    summary=summary,
)


def main() -> None:
    names = ["mlp-3", "cnn-5", "cnn-14", "resnet-18"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=8.0, help="time for one model")
    parser.add_argument("--no-tf32", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    device = pick_device("cuda")
    torch.set_float32_matmul_precision("highest" if args.no_tf32 else "high")
    torch.backends.cudnn.allow_tf32 = not args.no_tf32
    rate, bandwidth = matmul_rate(device), copy_rate(device)
    records, claimed, looks = [], [], []
    for name in args.models:
        bench = Bench(name, device)
        steps = bench.contenders()
        times = interleaved(steps, device, None, args.seconds)
        # Host time is noisier than device time: these two are measured again, in many rounds.
        times |= interleaved({who: steps[who] for who in ("two bare passes", "steppe SAM, eager")}, device, 30, 0.0)
        flops, moved = bench.work()
        for who, seconds in times.items():
            records.append({"model": name, "contender": who, "milliseconds": asdict(Spread.of(seconds, 1e3))})
        claimed += claims(name, derived(times))
        ceilings = {"ceiling_of_two_passes_ms": 2e3 * flops / rate, "memory_of_two_passes_ms": 2e3 * moved / bandwidth}
        records.append({"model": name, "flops_of_a_pass": flops, "bytes_of_a_pass": moved, **ceilings})
        rows = [[who, f"{Spread.of(t, 1e3).median:.3f}"] for who, t in derived(times).items()]
        rows.append(["two passes' multiplications alone", f"{2e3 * flops / rate:.3f}"])
        rows.append(["two passes' memory alone", f"{2e3 * moved / bandwidth:.3f}"])
        show_table(f"{name}, batch {bench.batch}", ["step", "ms"], rows)
        del steps
        if name == "cnn-5":
            rings = {str(k): bench.step_of(Ring(k), True) for k in range(1, 9)}
            for k, seconds in interleaved(rings, device, None, 3.0).items():
                looks.append({"model": name, "looks": int(k), "milliseconds": asdict(Spread.of(seconds, 1e3))})
            per_look = [r["milliseconds"]["median"] / r["looks"] for r in looks]
            print("ms per look, 1 to 8 looks:", " ".join(f"{t:.3f}" for t in per_look))
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    rows = []
    for c in claimed:
        ratio, met = f"{c['ratio']['median']:.2f}", "yes" if c["met"] else "NO"
        rows.append([f"{c['model']}: {c['what']} / {c['over']}", ratio, c["target"], met])
    show_table("claims", ["ratio", "measured", "target", "met"], rows)
    content = {"environment": environment(device), "tf32": not args.no_tf32, "matmul_flops_per_second": rate}
    content["copy_bytes_per_second"] = bandwidth
    write_json(args.results / "captured-cuda.json", {**content, "claims": claimed, "looks": looks, "results": records})


if __name__ == "__main__":
    main()
