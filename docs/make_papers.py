"""Writes docs/papers.md and README's table from the kept results: run it after `steppe paper collect`.

python docs/make_papers.py
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from steppe.papers.claims import NOT_REPRODUCED, NOT_RUN, REPRODUCED, SMALLER
from steppe.papers.definitions.s0 import ROWS
from steppe.papers.experiment import Experiment
from steppe.papers.figures import FIGURES, drawable
from steppe.papers.registry import PAPERS, experiments, find
from steppe.papers.show import HEADER, Line, fair, findings, lines, matrix, offset, run_on
from steppe.papers.store import Results

DOCS = Path(__file__).parent
INTRO = """# The papers, run again

Every table and figure of the five papers that steppe's methods come from is a grid of recipes: `steppe paper list`
names them, `steppe paper run s0/table1` runs one, `steppe paper show s0/table1` puts our numbers beside the paper's.
This page is made from the results in the folder `results` only.

How to read it:

- *Difference* is ours minus the paper's, in combined standard errors, √(se² + se²). Within 2 a number counts as
  **reproduced**. Papers seldom state preprocessing and initialisation, so a number may differ although the paper's
  statement about it holds. Statements are therefore judged separately.
- Statements are judged on paired differences, seed by seed, with simultaneous 95 % intervals for all comparisons of the
  statement. Direction, evidence and scale are said apart: a difference is *beyond doubt* if its interval leaves out zero.
- **run at smaller scale**: fewer epochs, less data, fewer than three seeds, a smaller problem than the paper's, or
  only some of the comparisons that the statement is about.
- **not run**: there is no result. Most often the data was not available (CIFAR-100, SVHN, ImageNet), or one GPU would
  need more than minutes. The recipe exists, and a smoke run of it is part of the tests.
- *n* is the number of our runs. *Seconds per run* is the training time divided by the number of runs that alternated
  in one process; up to four processes shared the GPU, so a run alone takes less.

To add results, run cells, on as many machines as you like, and collect their records:

```bash
steppe paper run s0/table1 --cells cifar10/cnn-5 --device cuda --together 5   # may be stopped; run it again to go on
steppe paper collect runs/s0 s0/table1                                        # each run is added once
python docs/make_papers.py
```

Nets of `s1/table1` are also tested on other ImageNet test sets, if these are beside the folder `imagenet`, as their
archives unpack. Missing sets are named before training begins; their columns stay empty.

| | beside `imagenet` | |
|---|---|---|
| ImageNet-Real | `real.json` | the validation images have ImageNet's file names: `ILSVRC2012_val_00000001.JPEG` |
| ImageNet-v2 | `imagenetv2-matched-frequency-format-val/0` … `999` | matched frequency |
| ImageNet-R | `imagenet-r/n01443537` … | 200 classes |
| ImageNet-C | `imagenet-c/fog/1/n01440764` … | 15 corruptions, severities 1 to 5: 3.75 million images |
"""


def page(results: Results) -> str:
    """The page's text."""
    parts = [INTRO, _summary(results)]
    for module in PAPERS.values():
        parts.append(f"## {module.TITLE}\n")
        if module.EXPERIMENTS[0].paper == "s2":
            parts.append("The paper calls its method GAM; here it is GNAM, since S0's has that name.\n")
        parts += [section(experiment, results) for experiment in module.EXPERIMENTS]
    return "\n".join(parts).rstrip() + "\n"


def _summary(results: Results) -> str:
    rows = ["| | " + " | ".join(_VERDICTS) + " |", "|---" * (len(_VERDICTS) + 1) + "|"]
    words, surprises, tested = [], [], False
    for module in PAPERS.values():
        mine = [experiment for experiment in experiments().values() if experiment in module.EXPERIMENTS]
        shown = [line for experiment in mine for line in lines(experiment, results) if line.judged is not None]
        counted = Counter(line.verdict for line in shown)
        if shown:
            rows.append(f"| {module.TITLE} | " + " | ".join(str(counted[v]) for v in _VERDICTS) + " |")
        for experiment in mine:
            for trend, verdict, found in findings(experiment, results):
                words.append(f"| {experiment.name} | {trend.text} | {found.short(verdict)} |")
                tested |= verdict in (REPRODUCED, NOT_REPRODUCED)
                if verdict == NOT_REPRODUCED:
                    surprises.append(f"- {trend.text} ({experiment.name}): {found.said}.")
    text = ["## At a glance", "", "How many of each paper's numbers:", "", *rows, ""]
    text += ["Their statements:", "", "| | | |", "|---|---|---|", *words, ""]
    text += ["## Statements that did not reproduce", ""]
    quiet = (
        "None: every statement that was tested at full scale holds." if tested else "None was tested at full scale yet."
    )
    heading = "Tested at full scale, these do not hold, or not significantly:"
    text += [heading, "", *surprises] if surprises else [quiet]
    return "\n".join([*text, ""])


_VERDICTS = (REPRODUCED, NOT_REPRODUCED, SMALLER, NOT_RUN)


def section(experiment: Experiment, results: Results) -> str:
    """The part of the page about one table or figure."""
    shows = experiment.shows if experiment.paper == "extra" else f"The paper's: {experiment.shows}"
    text = [f"### {experiment.name} · {experiment.title}", "", shows, ""]
    if experiment.needs:
        text += [f"Needs {experiment.needs}.", ""]
    for trend, verdict, found in findings(experiment, results):
        text += [f"- {trend.text}: {found.words(verdict)}"]
    whole = lines(experiment, results)
    shown = [line for line in whole if line.has_run or line.judged is not None]
    run = [line for line in shown if line.has_run]
    if experiment.name in FIGURES and drawable(experiment.name, results):
        text += ["", f"<!-- paper: {experiment.name} -->"]  # the build of the documentation draws it
    if grid := matrix(whole):
        text += ["", "Ours ± standard error (n) / the paper's, %:", "", *_table(grid)]
    if against := fair(experiment, results):
        text += ["", "Against the best base at no more cost, with simultaneous intervals:", "", *_table(against)]
    if said := offset(shown):
        text += ["", said]
    missing = len(shown) - len(run)
    listed = shown if missing <= 60 else run
    if run:
        text += ["", '<details markdown="1"><summary>Each number</summary>', "", *_table([HEADER, *_texts(listed)])]
        text += ["", "</details>"]
    elif listed:
        text += ["", *_table([HEADER, *_texts(listed)])]
    if len(listed) < len(shown):
        text += ["", f"{missing} numbers were not run. `steppe paper show {experiment.name}` lists them."]
    text += ["", *(f"{line}." for line in run_on(experiment, results))]
    if "small" in {results.scale_of(experiment), *(line.scale for line in run)}:
        part = "all training data" if experiment.share == 1 else f"{100 * experiment.share:g} % of the training data"
        text += ["", f"Small scale: one epoch for every {experiment.shorter} of the paper's, on {part}."]
    if not run and not results.scale_of(experiment):
        text += ["", "**not run**"]
    text += ["", *(f"*{choice}*\n" for choice in experiment.choices)]
    return "\n".join(text)


def _texts(shown: list[Line]) -> list[tuple[str, ...]]:
    return [line.texts() for line in shown]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


_BLOCK = re.compile(r"(<!-- s0/table1: begin -->\n).*?(\n<!-- s0/table1: end -->)", re.DOTALL)


def in_readme(text: str, results: Results) -> str:
    """README with S0's Table 1 from these results: data and net down, methods across."""
    grid = matrix(lines(find("s0/table1"), results))
    shown = ["", "sgd", "sam-0.1", "crsam", "gam"]
    table = [tuple(row[[r[0] for r in grid].index(name)] for name in shown) for row in zip(*grid, strict=True)]
    table[0] = ("", *(ROWS[name][0] for name in shown[1:]))
    return _BLOCK.sub(lambda found: found[1] + "\n".join(["", *_table(table), ""]) + found[2], text)


def write(results: Results | None = None, docs: Path = DOCS) -> list[Path]:
    """Write page and README's table; what was written."""
    results = results or Results.read()
    target = docs / "papers.md"
    target.write_text(page(results), encoding="utf-8")
    readme = docs.parent / "README.md"
    readme.write_text(in_readme(readme.read_text("utf-8"), results), encoding="utf-8")
    return [target, readme]


if __name__ == "__main__":
    for written in write():
        print(written)
