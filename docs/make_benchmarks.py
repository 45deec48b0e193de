"""Writes docs/benchmarks.md and its charts from benchmarks/results/*.json, and the equal-cost table of docs/choose.md.

python docs/make_benchmarks.py

Run it when a record changes; a test fails until then. Charts need matplotlib, the equal-cost table steppe.lab.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
CHARTS = DOCS / "assets" / "benchmarks"
EQUAL_COST = DOCS / "assets" / "equal_cost.json"  # a list of records that `steppe compare` wrote

Bars = dict[str, dict[str, float]]  # group -> series -> value


@dataclass(frozen=True)
class Chart:
    """One picture and the table under it."""

    name: str
    title: str
    axis: str
    bars: Bars
    one: str = ""  # what a line at 1 means; no line without it
    logarithmic: bool = False


# One reader for each script in benchmarks/


def step_overhead(record: dict[str, Any], name: str) -> Iterator[Chart]:
    """Time of a step over bare passes."""
    for method in ("SAM", "GSAM"):
        bars: Bars = {}
        for r in record["results"]:
            if r["method"] == method and r["contender"] != "steppe, closure":
                label = f"{r['model']}, {_count(r['parameters'])}, batch {r['batch']}"
                bars.setdefault(label, {})[_who(r["contender"])] = r["over_bare"]["median"]
        yield Chart(
            f"{name}-{method.lower()}", f"{method}, {_where(record)}", "time of a step", bars, "two bare passes"
        )


def peak_memory(record: dict[str, Any], name: str) -> Iterator[Chart]:
    """Peak memory over the base's."""
    for method in ("SAM", "GSAM"):
        bars: Bars = {}
        for r in record["results"]:
            if r["method"] == method and r["contender"] != "steppe, closure":
                label = f"{r['model']}, batch {r['batch']}"
                bars.setdefault(label, {})[_who(r["contender"])] = r["extra_in_parameter_bytes"]
        axis = "extra peak memory, in copies of the parameters"
        yield Chart(f"{name}-{method.lower()}", f"{method}, {_where(record)}", axis, bars, "one copy")


def method_cost(record: dict[str, Any], name: str) -> Iterator[Chart]:
    """Time of each method's step over as many bare passes as it looks."""
    bars = {f"{r['method']}, {r['looks']:.3g} looks": {"steppe": r["over_bare"]} for r in record["records"]}
    title = f"{record['model']}, batch {record['batch']}, {_where(record)}"
    yield Chart(name, title, "time of a step", bars, "as many bare passes")


def curvature(record: dict[str, Any], name: str) -> Iterator[Chart]:
    """Seconds until an estimate is as good as wanted."""
    what = {"top": "Largest eigenvalue to 0.1 %", "trace": "Trace to 1 %"}
    for measure, title in what.items():
        bars: Bars = {}
        for net, results in record["nets"].items():
            reached = {who: r.get("to_target") for who, r in results[measure].items() if who != "ratios"}
            label = f"{net}, {_count(results['weights'])}"
            bars[label] = {who: end["seconds"] for who, end in reached.items() if end}
        yield Chart(f"{name}-{measure}", f"{title}, {_where(record)}", "seconds", bars, logarithmic=True)


def captured(record: dict[str, Any], name: str) -> Iterator[Chart]:
    """Milliseconds of a step, eager and captured."""
    bars: Bars = {}
    ceilings = {"ceiling_of_two_passes_ms": "multiplications alone", "memory_of_two_passes_ms": "memory alone"}
    for r in record["results"]:
        times = bars.setdefault(r["model"], {})
        if "contender" in r:
            times[r["contender"]] = r["milliseconds"]["median"]
        else:
            times |= {f"(two passes' {said})": r[name] for name, said in ceilings.items()}
    for model, times in bars.items():
        one_each = {who: {"milliseconds": t} for who, t in times.items()}
        yield Chart(f"{name}-{model}", f"{model}, {_where(record)}", "milliseconds a step", one_each, logarithmic=True)
    each = {f"{r['looks']}": {"a look": r["milliseconds"]["median"] / r["looks"]} for r in record["looks"]}
    model = record["looks"][0]["model"]
    yield Chart(f"{name}-looks", f"{model}, by looks a step, {_where(record)}", "milliseconds a look", each)


def claims(record: dict[str, Any]) -> list[str]:
    """What was aimed at, and whether it was reached in this record."""
    if "claims" not in record:
        return []
    lines = ["| aimed at | target | measured (quartiles) | reached |", "|---|---|---|---|"]
    for c in record["claims"]:
        ratio, q1, q3 = (f"{c['ratio'][key]:.3f}" for key in ("median", "q1", "q3"))
        met = "yes" if c["met"] else "**no**"
        lines.append(f"| {c['model']}: {c['what']} / {c['over']} | {c['target']} | {ratio} ({q1} to {q3}) | {met} |")
    return [*lines, ""]


def host(record: dict[str, Any], name: str) -> Iterator[Chart]:
    """Host and device time of eager steps, and what the host does in steppe's part."""
    for layout, found in record["layouts"].items():
        short = f"{name}-{layout.split(',')[0].replace(' ', '-')}"
        times: Bars = {}
        for r in found["steps"]:
            label = f"{r['contender']}, {r['launches']:.0f} launches"
            times[label] = {"host": r["host_ms"]["median"], "until the device is done": r["all_ms"]["median"]}
        where = f"ResNet-18, batch {record['batch']}, {layout}, {_where(record)}"
        yield Chart(short, f"Eager SAM, {where}", "milliseconds a step", times)
        medians = {part: spread["median"] for part, spread in found["parts"].items() if not part.startswith("a step")}
        whole, launch = medians.pop("all of steppe's"), medians.pop("one launch")
        rest = whole - sum(medians.values())
        parts = {"all of steppe's": whole, **medians, "the rest, in Python": rest, "(one launch of a kernel)": launch}
        bars = {part: {"host": value} for part, value in parts.items()}
        yield Chart(f"{short}-parts", f"Of the host, {where}", "microseconds a step", bars)


def kernels(record: dict[str, Any], name: str) -> Iterator[Chart]:
    """Time of a step and of its kernels, and what the kernels of recorded steps do."""
    for model in dict.fromkeys(r["model"] for r in record["results"]):
        mine = [r for r in record["results"] if r["model"] == model]
        times: Bars = {}
        kinds: Bars = {}
        for r in mine:
            label = f"{r['contender']}, {r['kernels']:.0f} kernels"
            times[label] = {"a step": r["milliseconds"]["median"], "the device at work": r["busy_us"] / 1e3}
            who, captured, compiled = r["contender"].partition(", captured")
            if captured:
                for kind, spent in r["kinds"].items():
                    kinds.setdefault(kind, {})[f"{who}{compiled}"] = spent["us"]
        yield Chart(f"{name}-{model}", f"{model}, {_where(record)}", "milliseconds a step", times, logarithmic=True)
        yield Chart(f"{name}-{model}-kinds", f"{model}, captured, by what kernels do", "microseconds a step", kinds)


def limits(record: dict[str, Any], name: str) -> Iterator[Chart]:
    """What one pass would save, and what precision costs and spoils."""
    passes = {
        r["model"]: {"one after the other": r["apart"]["median"], "one batched pass": r["joined"]["median"]}
        for r in record["one_pass"]
    }
    yield Chart(f"{name}-pass", f"Two gradients at one point, recorded, {_where(record)}", "milliseconds", passes)
    times: Bars = {}
    errors: Bars = {}
    for r in record["precision"]:
        times.setdefault(r["model"], {})[r["precision"]] = r["sam_ms_a_seed"]["median"]
        errors.setdefault(f"{r['model']}, direction", {})[r["precision"]] = r["direction_error"]
        errors.setdefault(f"{r['model']}, slope of γ", {})[r["precision"]] = r["slope_error"]
    yield Chart(f"{name}-precision", f"SAM, recorded, five at once, {_where(record)}", "milliseconds a seed", times)
    title = "GAM's direction and slope, error against float64"
    yield Chart(f"{name}-errors", title, "relative error", errors, logarithmic=True)


def looks() -> Chart:
    """Gradient evaluations a step of every method, for the page on choosing one."""
    from steppe.methods.registry import own_methods as known_methods
    from steppe.methods.registry import with_defaults

    costs = {cls.__name__: float(with_defaults(cls).cost) for cls in known_methods()}
    costs.pop("Every")  # costs what it is asked to
    by_cost = sorted(costs.items(), key=lambda pair: (pair[1], pair[0]))
    bars = {name: {"gradients": cost} for name, cost in by_cost}
    return Chart("looks", "Looks a step", "gradients a step, with the default settings", bars)


@dataclass(frozen=True)
class Kind:
    """What one script of benchmarks/ measures, in words, and how to read its records."""

    title: str
    words: str
    read: Callable[[dict[str, Any], str], Iterator[Chart]]


KINDS = {
    "step_overhead": Kind(
        "Time of a step",
        "A SAM step is two gradients; what comes on top is the library's. Each bar is the median time of a step over "
        "two bare passes and the base optimizer's step, timed in turn in one run. 1 is the least possible.",
        step_overhead,
    ),
    "captured": Kind(
        "Captured steps",
        "What recording a whole step as one CUDA graph (`steppe.capture`) saves. Medians, timed in turn in one run; in "
        "brackets what the passes' arithmetic, and their reads and writes, would take by themselves.",
        captured,
    ),
    "host": Kind(
        "What the host does",
        "An eager step of ResNet-18 takes as long as the host needs to launch it; the device waits. What steppe does "
        "around the two passes is a few kernels, a copy of the weights and of the buffers, and a Python loop over the "
        "parameters now and then: one to two milliseconds on a host that takes 14 to 19 microseconds for one launch. "
        "A captured step has none of it.",
        host,
    ),
    "kernels": Kind(
        "What the device does",
        "A recorded step keeps the device at work from its first kernel to its last, so what it takes is what its "
        "kernels take: two passes, the base's step, and for SAM a copy of the weights and back, the norm, and the "
        "climb. The peers run about the same kernels; most of their step the device waits for the host. How many times "
        "faster a recorded step is, then, says as much about the host as about the step, and differs from machine to "
        "machine.",
        kernels,
    ),
    "limits": Kind(
        "What is left to save",
        "Whether two gradients are cheaper in one pass, and what lower precision costs GAM, whose directions and "
        "slopes are differences of gradients. GAM's two gradients at one point stay two passes: one batched pass saves "
        "a twentieth on small nets, costs half as much again on CNN-14, and cannot keep BatchNorm's statistics. No "
        "look is carried over from one step to the next either: weights and batch are new, so it would be another "
        "method (LookSAM is one).",
        limits,
    ),
    "method_cost": Kind(
        "Every method",
        "The median time of each method's step over as many bare passes as it looks. 1 is the least possible: what is "
        "below shows the noise.",
        method_cost,
    ),
    "peak_memory": Kind(
        "Memory",
        "Peak memory of a step beyond the base optimizer's, in copies of the parameters.",
        peak_memory,
    ),
    "curvature": Kind(
        "Curvature",
        "Seconds until an estimate is within its target of the true value: the fastest setting of each library that "
        "gets there. A missing bar did not.",
        curvature,
    ),
}


def three_digits(value: float) -> str:
    """Three significant digits, zeros too; all those before the point."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def _who(contender: str) -> str:
    return "steppe" if contender.startswith("steppe") else contender


def _where(record: dict[str, Any]) -> str:
    return str(record["environment"]["device"])


def _count(n: int) -> str:
    return f"{n / 1e6:.1f}M" if n >= 1e6 else f"{n / 1e3:.0f}k"


# Pages


def charts_of(path: Path) -> list[Chart]:
    """The charts of a record; none for a kind of record that nobody has told this script about."""
    kind = KINDS.get(kind_of(path))
    return list(kind.read(json.loads(path.read_text("utf-8")), path.stem)) if kind else []


def kind_of(path: Path) -> str:
    """Which script wrote a record."""
    return path.stem.split("-")[0]


INTRODUCTION = (
    "Every picture is drawn from a record in `benchmarks/results/`; the script of the same name in `benchmarks/` makes",
    "it again. What is compared ran side by side, so that a slow machine slows both.",
)


def page(records: list[Path]) -> str:
    """The page of benchmarks."""
    lines = ["# Benchmarks", "", *INTRODUCTION, ""]
    for name, kind in KINDS.items():
        mine = [path for path in records if kind_of(path) == name]
        if mine:
            lines += [f"## {kind.title}", "", kind.words, ""]
        for path in mine:
            about = json.loads(path.read_text("utf-8"))["environment"]
            lines += ['<div class="grid" markdown>', ""]
            for chart in charts_of(path):
                lines += ["<div markdown>", "", *_shown(chart), "</div>", ""]
            lines += ["</div>", "", *claims(json.loads(path.read_text("utf-8")))]
            commit = f", commit {about['commit']}" if about.get("commit") else ""
            lines += [f"Record: `{path.name}`. {about['device']}, torch {about['torch']}, Python {about['python']}, "
                      f"{about['threads']} threads, {about['date'][:10]}{commit}.", ""]  # fmt: skip
    others = [path.name for path in records if kind_of(path) not in KINDS]
    if others:
        lines += ["## Other records", "", *(f"- `{name}`" for name in others), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _shown(chart: Chart) -> list[str]:
    series = list(dict.fromkeys(who for group in chart.bars.values() for who in group))
    alt = f"Bar chart. {chart.title}: {chart.axis}".replace('"', "")
    lines = [f"### {chart.title}" + " {: #" + chart.name + " }", ""]
    for scheme in ("light", "dark"):
        lines.append(f"![{alt}](assets/benchmarks/{chart.name}-{scheme}.svg#only-{scheme})")
    lines += ["", '??? note "The numbers"', "", f"    | {chart.axis} | {' | '.join(series)} |"]
    lines.append("    |---|" + "---|" * len(series))
    for group, values in chart.bars.items():
        cells = (three_digits(values[who]) if who in values else "" for who in series)
        lines.append(f"    | {group} | {' | '.join(cells)} |")
    return [*lines, ""]


_BLOCK = re.compile(r"(<!-- equal cost: begin -->\n).*?(<!-- equal cost: end -->)", re.DOTALL)


def equal_cost(path: Path = EQUAL_COST) -> str:
    """What methods gain over the base trained as long as they cost, from records; without records, how to make them."""
    if not path.exists():
        return (
            "There are no published records yet. Make your own, on your problem:\n\n"
            "```bash\nsteppe compare --data cifar-10 --model cnn-5 --methods sam,gsam,asam --seeds 5\n```\n"
        )
    from steppe.lab.statistics import summarise

    rows = [row for row in summarise(json.loads(path.read_text("utf-8"))) if row.mean is not None]
    lines = []
    for problem in dict.fromkeys(row.problem for row in rows):
        lines += [
            f"### {problem}",
            "",
            "| | test accuracy | gradients | at equal cost | seeds |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            if row.problem == problem:
                gain = _gain(row.equal_cost) if row.equal_cost else ""
                cost = "" if row.cost is None else f"{row.cost:.3g} x"
                lines.append(f"| {row.label} | {_percent(row.mean)} | {cost} | {gain} | {row.n} |")
        lines.append("")
    lines.append(
        f"Means with 95 % intervals, from the records in `assets/{path.name}`. *At equal cost*: percentage points"
    )
    lines.append("over the base trained as long as the method costs, seed by seed.")
    return "\n".join(lines) + "\n"


def _percent(mean: Any) -> str:
    half = "" if mean.low is None else f" ± {100 * (mean.high - mean.value):.2f}"
    return f"{100 * mean.value:.2f}{half} %"


def _gain(difference: Any) -> str:
    mean = difference.mean
    half = "" if mean.low is None else f" ± {100 * (mean.high - mean.value):.2f}"
    return f"{100 * mean.value:+.2f}{half} ({difference.verdict})"


def pages() -> dict[Path, str]:
    """Every generated text."""
    choose = DOCS / "choose.md"
    filled = _BLOCK.sub(lambda found: found[1] + "\n" + equal_cost() + "\n" + found[2], choose.read_text("utf-8"))
    return {DOCS / "benchmarks.md": page(sorted(RESULTS.glob("*.json"))), choose: filled}


# Pictures

COLOURS = {
    "light": {"text": "#24292f", "line": "#9aa4ae", "series": ["#00796b", "#f4713c", "#8d99a6", "#5c6bc0"]},
    "dark": {"text": "#e4e7ec", "line": "#68717d", "series": ["#2dd4bf", "#ff9466", "#9aa7b5", "#9fa8da"]},
}


KNOWN = ("steppe", "pytorch-optimizer", "two-step loop")  # always in the same colours


def pictures() -> dict[Path, tuple[Chart, str]]:
    """Every picture: its chart and its scheme."""
    charts = [looks(), *(chart for path in sorted(RESULTS.glob("*.json")) for chart in charts_of(path))]
    return {CHARTS / f"{chart.name}-{scheme}.svg": (chart, scheme) for chart in charts for scheme in COLOURS}


def digest(chart: Chart) -> str:
    """Of what a picture shows and of how it is drawn. It is written into the picture, which may be drawn by any
    version of matplotlib.
    """
    drawing = Path(__file__).read_text("utf-8").partition("# Pictures\n")[2]
    return hashlib.sha256((repr(chart) + drawing).encode()).hexdigest()[:16]


def draw(chart: Chart, scheme: str, path: Path) -> None:
    """Horizontal bars with their values, so that it reads on a phone."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colours = COLOURS[scheme]
    series = list(dict.fromkeys(who for group in chart.bars.values() for who in group))
    rows = [(group, [(who, values[who]) for who in series if who in values]) for group, values in chart.bars.items()]
    colour = {who: colours["series"][KNOWN.index(who) if who in KNOWN else i] for i, who in enumerate(series)}
    apart = len(series) > 1  # bars of a group stand together under its name; else the names stand beside the bars
    height = 0.6 + sum(0.27 * len(bars) + 0.36 * apart for _, bars in rows) + 0.35 * apart
    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "steppe", "font.family": "sans-serif", "font.size": 11,
        "text.color": colours["text"], "axes.labelcolor": colours["text"], "xtick.color": colours["text"],
    }  # fmt: skip
    with mpl.rc_context(settings):
        figure = Figure(figsize=(5.6, height), layout="constrained")
        axes = figure.subplots()
        values = [value for _, bars in rows for _, value in bars]
        start = 10.0 ** math.floor(math.log10(min(values) / 2)) if chart.logarithmic else 0.0
        y, places, most = 0.0, [], max(values)
        for group, bars in rows:
            if apart:
                axes.text(0, y, group, transform=axes.get_yaxis_transform(), va="center", weight="bold", size=10.5)
            for who, value in bars:
                y += 0.78
                axes.barh(y, value - start, left=start, height=0.66, color=colour[who])
                axes.text(value, y, f" {three_digits(value)}", va="center", size=10)
            places.append(y)
            y += 1.05 * apart
        if chart.logarithmic:
            axes.set_xscale("log")
            axes.set_xlim(start, most * 4)
        else:
            axes.set_xlim(0, most * 1.14)
        if chart.one:
            axes.axvline(1, color=colours["text"], linewidth=0.9, linestyle=(0, (4, 3)))
        axes.set_xlabel(chart.axis + (f" (1: {chart.one})" if chart.one else ""))
        axes.set_ylim(y - 0.3 if apart else y + 0.6, -0.6 if apart else 0.2)
        axes.set_yticks([] if apart else places, [] if apart else [group for group, _ in rows], size=10)
        axes.tick_params(axis="y", length=0, colors=colours["text"])
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(colours["line"])
        if apart:
            handles = [Patch(color=colour[who], label=who) for who in series]
            figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Description": digest(chart)})


def main() -> None:
    """Write what has changed, remove what nothing shows any more."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    wanted = pictures()
    for path, (chart, scheme) in wanted.items():
        if not path.exists() or digest(chart) not in path.read_text("utf-8"):
            draw(chart, scheme, path)
    for path in set(CHARTS.glob("*.svg")).difference(wanted):
        path.unlink()


if __name__ == "__main__":
    main()
