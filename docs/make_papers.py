"""Writes docs/papers.md and the pages of docs/papers from the kept results: run it after `steppe paper collect`.

python docs/make_papers.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from steppe.papers.claims import NOT_REPRODUCED, NOT_RUN, OPEN, REPRODUCED, SMALLER
from steppe.papers.experiment import Experiment
from steppe.papers.figures import FIGURES, drawable
from steppe.papers.registry import PAPERS
from steppe.papers.show import HEADER, Line, fair, findings, lines, matrix, offset, run_on
from steppe.papers.store import Results

DOCS = Path(__file__).parent
INTRO = """# The papers, run again

**Do the methods do what their papers say?** Every table and figure of five papers is a recipe in steppe. What was run
of them is on these pages, beside the papers' numbers. The pages are generated from the records in `results/`.
"""
HOW = """## How to read it

- A **number** counts as *reproduced* if ours is within 2 combined standard errors, √(se² + se²), of the paper's.
  Papers seldom state preprocessing and initialisation, so a number may differ although the paper's statement about it
  holds.
- A **statement** ("A is above B") is therefore judged on our runs alone: on differences paired by seed, with
  simultaneous 95 % confidence intervals for all comparisons of the statement. Its direction, its evidence and the
  scale of our runs are reported separately. A difference is *beyond doubt* if its interval excludes zero.
- **Run at smaller scale** means fewer epochs, less data, fewer than three seeds, a smaller problem than the paper's,
  or only some of the comparisons that the statement is about.
- **Not run** means that there is no result. Most often the data was not available (CIFAR-100, SVHN, ImageNet), or it
  would take more than minutes on one GPU. The recipe exists, and the tests run a small version of it.
- **n** is the number of our runs. **Seconds per run** is the training time divided by the number of runs that
  alternated in one process. Up to four processes shared the GPU, so a run alone takes less.

## Run it yourself

`steppe paper list` names the tables and figures, `steppe paper show s0/table1` prints our numbers beside the paper's.
To add results, run some cells of a table, on as many machines as you like, and collect their records:

```bash
steppe paper run s0/table1 --cells cifar10/cnn-5 --device cuda --together 5   # after an interruption, run it again
steppe paper collect runs/s0 s0/table1                                        # each run is added once
python docs/make_papers.py
```

Nets of `s1/table1` are also tested on other ImageNet test sets, if these have been unpacked beside the folder
`imagenet`. Missing sets are named before training begins; their columns stay empty.

| | beside `imagenet` | |
|---|---|---|
| ImageNet-Real | `real.json` | the validation images have ImageNet's file names: `ILSVRC2012_val_00000001.JPEG` |
| ImageNet-v2 | `imagenetv2-matched-frequency-format-val/0` … `999` | matched frequency |
| ImageNet-R | `imagenet-r/n01443537` … | 200 classes |
| ImageNet-C | `imagenet-c/fog/1/n01440764` … | 15 corruptions, severities 1 to 5: 3.75 million images |
"""


def pages(results: Results) -> dict[str, str]:
    """The text of each page by its place: an overview, and one page a paper."""
    made = {"papers.md": f"{INTRO}\n{_overview(results)}\n{HOW}"}
    for name, module in PAPERS.items():
        parts = [f"# {module.TITLE}\n"]
        if name == "s2":
            parts.append("The paper calls its method GAM. Here it is called GNAM, because S0's method has that name.\n")
        if said := _answer(judged_statements(module.EXPERIMENTS, results)):
            parts.append(said)
        run = [e for e in module.EXPERIMENTS if results.scale_of(e)]
        parts += [section(experiment, results) for experiment in run]
        rest = [e for e in module.EXPERIMENTS if e not in run]
        made[f"papers/{name}.md"] = "\n".join([*parts, *_not_run(rest)]).rstrip() + "\n"
    return made


def _overview(results: Results) -> str:
    """How many of each paper's numbers and statements have which verdict. The statements are on the papers' pages."""
    lines_ = [f"| numbers | {' | '.join(_VERDICTS)} |", "|---" * (len(_VERDICTS) + 1) + "|"]
    words = [f"| statements | {' | '.join(_OF_STATEMENTS)} |", "|---" * (len(_OF_STATEMENTS) + 1) + "|"]
    for name, module in PAPERS.items():
        link = f"[{module.TITLE}](papers/{name}.md)"
        shown = [line for experiment in module.EXPERIMENTS for line in lines(experiment, results) if line.judged]
        counted = Counter(line.verdict for line in shown)
        if shown:
            lines_.append(f"| {link} | {' | '.join(str(counted[v] or '') for v in _VERDICTS)} |")
        if judged := judged_statements(module.EXPERIMENTS, results):
            words.append(f"| {link} | {' | '.join(str(judged.count(v) or '') for v in _OF_STATEMENTS)} |")
    extra = next(module for name, module in PAPERS.items() if name == "extra")
    rest = f"[{extra.TITLE}](papers/extra.md) has results that are in no paper."
    return "\n".join(["## At a glance", "", *words, "", *lines_, "", rest, ""])


_VERDICTS = (REPRODUCED, NOT_REPRODUCED, SMALLER, NOT_RUN)
_OF_STATEMENTS = (REPRODUCED, OPEN, NOT_REPRODUCED, SMALLER, NOT_RUN)


def judged_statements(all_of: Sequence[Experiment], results: Results) -> list[str]:
    """The verdict on each statement of a paper."""
    found = [one for experiment in all_of for one in findings(experiment, results)]
    return [verdict for trend, verdict, _ in found if not trend.ours]


def _answer(judged: Sequence[str]) -> str:
    """The first sentence of a paper's page: how many of its statements have which verdict."""
    if not judged:
        return ""
    counts = Counter(judged)
    said = ", ".join(f"{counts[verdict]} {words}" for verdict, words in _IN_WORDS.items() if counts[verdict])
    link = "[how they are judged](../papers.md#how-to-read-it)"
    return f"**The paper's {len(judged)} statements: {said}** ({link}).\n"


_IN_WORDS = {
    REPRODUCED: "reproduced",
    OPEN: "in its direction but not beyond doubt",
    NOT_REPRODUCED: "not reproduced",
    SMALLER: "tested at a smaller scale only",
    NOT_RUN: "not tested",
}


def _not_run(rest: Sequence[Experiment]) -> list[str]:
    """What has no results, folded away."""
    if not rest:
        return []
    lines_ = [f"- {e.name} · {e.title}." + (f" Needs {e.needs}." if e.needs else "") for e in rest]
    return ['<details markdown="1"><summary>Not run</summary>', "", *lines_, "", "</details>"]


OWN_PAGES = {"extra/frontier": "frontier.md"}


def section(experiment: Experiment, results: Results) -> str:
    """The part of the page about one table or figure."""
    drawn = [f"<!-- paper: {experiment.name} -->"] if _has_figure(experiment, results) else []  # drawn by the build
    if page := OWN_PAGES.get(experiment.name):
        said = f"{experiment.shows} The numbers are on [its own page](../{page})."
        return "\n".join([f"## {experiment.name} · {experiment.title}", "", said, "", *drawn, ""])
    shows = experiment.shows if experiment.paper == "extra" else f"In the paper: {experiment.shows}"
    text = [f"## {experiment.name} · {experiment.title}", "", shows, ""]
    if experiment.needs:
        text += [f"Needs {experiment.needs}.", ""]
    judged = findings(experiment, results)
    text += [f"- {trend.text}: {found.short(verdict)}." for trend, verdict, found in judged]
    if behind := [f"- {trend.text}: {found.details}." for trend, _, found in judged if found.details]:
        text += [
            "",
            '<details markdown="1"><summary>The differences behind these verdicts</summary>',
            "",
            *behind,
            "",
            "</details>",
        ]
    whole = lines(experiment, results)
    shown = [line for line in whole if line.has_run or line.judged is not None]
    run = [line for line in shown if line.has_run]
    text += ["", *drawn] if drawn else []
    if grid := matrix(whole, experiment.rows):
        paper = "" if experiment.rows else " / the paper's number"  # a table with rows of its own is not the paper's
        text += ["", f"Ours ± standard error (n){paper}, in %:", "", *_table(grid)]
    if against := fair(experiment, results):
        said = "Compared with the best base that costs no more, with simultaneous 95 % confidence intervals:"
        text += ["", said, "", *_table(against)]
    if said := offset(shown):
        text += ["", said]
    missing = len(shown) - len(run)
    listed = run or shown
    if run:
        text += ["", '<details markdown="1"><summary>Each number</summary>', "", *_table([HEADER, *_texts(listed)])]
        text += ["", "</details>"]
    elif listed:
        text += ["", *_table([HEADER, *_texts(listed)])]
    if len(listed) < len(shown):
        text += ["", f"{missing} numbers were not run. `steppe paper show {experiment.name}` lists them."]
    how = [f"- {line}." for line in run_on(experiment, results)]
    if "small" in {results.scale_of(experiment), *(line.scale for line in run)}:
        part = "all training data" if experiment.share == 1 else f"{100 * experiment.share:g} % of the training data"
        how += [f"- Small scale: one epoch for every {experiment.shorter} of the paper's, on {part}."]
    if not run and not results.scale_of(experiment):
        text += ["", "**not run**"]
    how += [f"- {choice}" for choice in experiment.choices]
    if how:
        text += ["", '<details markdown="1"><summary>How it was run</summary>', "", *how, "", "</details>"]
    return "\n".join([*text, ""])


def _has_figure(experiment: Experiment, results: Results) -> bool:
    return experiment.name in FIGURES and drawable(experiment.name, results) is not None


def _texts(shown: list[Line]) -> list[tuple[str, ...]]:
    return [line.texts() for line in shown]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def write(results: Results | None = None, docs: Path = DOCS) -> list[Path]:
    """Write the pages; what was written."""
    made = pages(results or Results.read())
    (docs / "papers").mkdir(exist_ok=True)
    for place, text in made.items():
        (docs / place).write_text(text, encoding="utf-8")
    return [docs / place for place in made]


if __name__ == "__main__":
    for written in write():
        print(written)
