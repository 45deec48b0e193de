"""S0: Generalization Aware Minimization (anonymous, under review)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...lab.statistics import Mean, mean_of
from ...methods.gam import transformation
from ..claims import NEAR, NOTHING, Contest, Finding, Trend, claims_table, contests, falls_along, lost
from ..experiment import Cell, Experiment, trained
from ..quadratic import Quadratics, learn, paper_method
from ..store import Results
from . import s0_theorem
from .s0_columns import ADAM, COLUMNS, table1_cells

TITLE = "S0 · Generalization Aware Minimization"
_CNN5 = {**ADAM, **COLUMNS["cifar10/cnn-5"]}
PERIODS = (1, 2, 5, 10, 20)


def _cnn5(name: str, label: str, method: str, **settings: Any) -> Cell:
    return trained(name, label, **{**_CNN5, "method": method, **settings})


_BASICS = (
    _cnn5("sgd", "SGD (Adam)", "plain"),
    _cnn5("sam-0.01", "SAM 0.01", "sam:rho=0.01,normalize=false"),
)
_FIG3 = (
    *_BASICS,
    *(_cnn5(f"period-{k}", f"GAM, γ every {k}", f"gam:period={k}") for k in PERIODS),
    *(
        _cnn5(f"period-{k}-faster", f"GAM, γ every {k}, lr x {k}", f"gam:period={k},lr_times_period=true")
        for k in PERIODS[1:]
    ),
)
TS, BATCHES, EPSILONS = (1, 2, 3, 4, 5), (25, 50, 100, 200, 400), ("1e-5", "0.0001", "0.001", "0.01", "0.1")
_FIG6 = (
    *(_cnn5(f"T/{T}", f"T = {T}", f"gam:T={T}") for T in TS),
    *(_cnn5(f"batch/{b}", f"batch {b}", "gam", batch=b) for b in BATCHES),
    *(_cnn5(f"eps/{e}", f"ε = {e}", f"gam:eps={e}") for e in EPSILONS),
)
_CHOICES = (
    *(_cnn5(f"auxiliary/{a}", f"GAM, X̄ {a}", "gam", auxiliary=a) for a in ("previous", "fresh", "fixed")),
    _cnn5("T-1", "GAM, T = 1", "gam:T=1"),
    _cnn5("T-3", "GAM, T = 3", "gam:T=3"),
    _cnn5("T-3-normalized", "GAM, T = 3, dᵗ scaled to d¹", "gam:T=3,normalize=true"),
    _cnn5("T-2-normalized", "GAM, T = 2, dᵗ scaled to d¹", "gam:normalize=true"),
    *(_cnn5(f"sam-{g}", f"SAM γ {g}, unnormalised", f"sam:rho={g},normalize=false") for g in ("0.1", "0.3", "1.0")),
    _cnn5("sam-normalized", "SAM ρ 0.05, normalised", "sam:rho=0.05"),
    _cnn5("sgd", "Adam", "plain"),
    _cnn5("sgd-40", "Adam, 40 epochs", "plain", epochs=40, role="equal-cost"),
    _cnn5("mnist-cnn-3/T-2", "MNIST, CNN-3: GAM, T = 2", "gam:T=2", **COLUMNS["mnist/cnn-3"]),
    _cnn5(
        "mnist-cnn-3/T-3-normalized",
        "MNIST, CNN-3: GAM, T = 3, dᵗ scaled to d¹",
        "gam:T=3,normalize=true",
        **COLUMNS["mnist/cnn-3"],
    ),
)
_NOTES = (
    "Preprocessing and initialisation are not stated: inputs are in [0, 1], no augmentation, torch's initialisation.",
    "Alg. 1 draws the auxiliary batch once, but the text has several batches: here it is the previous batch "
    "(s0/choices compares previous, fresh and fixed).",
    "The row called SGD is Adam at 1e-3, as in Appendix E. SAM γ perturbs by γ times the gradient, not normalised.",
)


def quadratic(cell: str, scale: str, seed: int) -> dict[str, Any]:
    """Figure 4: what GAM learns on quadratics."""
    problem = Quadratics.drawn(seed)
    iterations = {"full": 100_000, "small": 5_000, "smoke": 20}[scale]
    gamma = learn(problem, paper_method(), range(iterations))
    learned = transformation(gamma, problem.observed)
    lists = {"true": problem.true, "observed": problem.observed, "gamma": gamma, "learned": learned}
    return {
        **{name: tensor.tolist() for name, tensor in lists.items()}, "iterations": iterations,
        "distance_before": problem.distance(problem.observed), "distance_after": problem.distance(learned),
    }  # fmt: skip


EXPERIMENTS = (
    Experiment(
        "s0/table1", "Table 1: test accuracy by data, model and method",
        "Six methods in nine columns. GAM is best on the MLPs, on MNIST's CNN and on ImageNet; CR-SAM on the CNNs of "
        "CIFAR-10 and SVHN.",
        table1_cells(), seeds=5,
        choices=(*_NOTES, "Fashion-MNIST is run in place of SVHN; the paper has no number to compare it with.",
                 "Precision is not stated: float32; TF32 for CNN-5 on SVHN and Fashion-MNIST; for CNN-14 float16 "
                 "with a fixed loss scale, which rounds nearly like TF32 and takes less than half of float32's time; "
                 "for GAM, whose gradients overflow float16, TF32."),
        shorter=5, share=0.2,
    ),
    Experiment(
        "s0/fig2", "Figure 2: the learned transformation P(λ) of eigenvalues",
        "P(λ) = λ + Σ γ_t λ^{t+1} at the end of training, by column: GAM's curve lies above SAM's for large λ.",
        tuple(c for c in table1_cells() if c.name.endswith("/gam")), seeds=5, shorter=5, share=0.2,
        choices=("Drawn from γ of Table 1's runs. In the statements, 'large' is λ = 10 and 'small' λ = 1.",),
    ),
    Experiment(
        "s0/fig3", "Figure 3: γ updated every k-th step",
        "CNN-5 on CIFAR-10, accuracy and time against the period: about 4x the time of SGD at period 1, 3x at the "
        "longest, and accuracy above SAM and SGD throughout.",
        _FIG3, seeds=5, shorter=5, share=0.2,
        choices=(*_NOTES[:2], "The periods are not in the text: 1, 2, 5, 10, 20. 'lr x k' gives the γ-optimizer k "
                 "times the learning rate, which the paper does not."),
    ),
    Experiment(
        "s0/fig4", "Figure 4: a quadratic whose transformation is known",
        "P(λ̃) learned by GAM (T = 12) follows the true eigenvalue λ over the range of observed ones.",
        (Cell("quadratic", None, "GAM, T = 12"),), seeds=3, compute=quadratic,
    ),
    Experiment(
        "s0/fig5", "Figure 5: test error by epoch",
        "Error of every method after each epoch, by column: GAM may lie above the others early and ends below.",
        tuple(c for c in table1_cells() if not c.name.startswith("imagenet")), seeds=5, shorter=5, share=0.2,
        choices=("Drawn from Table 1's runs.",),
    ),
    Experiment(
        "s0/fig6", "Figure 6: T, batch size and ε",
        "GAM with CNN-5 on CIFAR-10: unstable for large T, best at small batches, and ε matters little.",
        _FIG6, seeds=5, shorter=5, share=0.2, choices=(*_NOTES[:2], "The values are not in the text: they are ours."),
    ),
    Experiment(
        "s0/choices", "Choices that the paper leaves open (not in the paper)",
        "The paper has no such table.",
        _CHOICES, seeds=5, shorter=5, share=0.2,
    ),
    *s0_theorem.EXPERIMENTS,
)  # fmt: skip

CLAIMS = claims_table(
    "s0/table1",
    ("mnist/mlp-3", "mnist/cnn-3", "cifar10/mlp-3", "cifar10/cnn-5", "cifar10/cnn-14", "svhn/mlp-3", "svhn/cnn-5",
     "svhn/cnn-14", "imagenet/resnet-50"),
    {
        "sgd": ".97368±.00072 .96216±.00117 .54500±.00216 .66334±.00104 .83430±.00237 .79729±.00223 .87824±.00055 "
        ".93852±.00084 .64928",
        "sam-0.001": ".97356±.00082 .96224±.00111 .54552±.00241 .66716±.00123 .83138±.00231 .79909±.00246 "
        ".87919±.00033 .93937±.00069 -",
        "sam-0.01": ".97352±.00032 .96244±.00117 .54404±.00216 .66974±.00232 .83328±.00213 .80234±.00169 "
        ".87853±.00033 .94156±.00048 -",
        "sam-0.1": ".97466±.00046 .96298±.00088 .55394±.0017 .68100±.0014 .84288±.00345 .80627±.0022 .88334±.00095 "
        ".94252±.00143 .65232",
        "crsam": ".97038±.00149 .93852±.01727 .55402±.00148 .69444±.00117 .85892±.00059 .80181±.00221 .89792±.00119 "
        ".95383±.00113 -",
        "gam": ".97518±.00063 .96392±.00036 .56356±.00162 .69396±.00154 .85074±.00122 .81175±.00217 .88357±.00057 "
        ".94299±.00025 .65924",
    },
    n=5,
)  # fmt: skip


# Trends

_OURS = [column for column in COLUMNS if not column.startswith("imagenet")]


def _pairs(better: str, worse: str, columns: list[str]) -> list[Contest]:
    pairs = []
    for column in columns:
        place = COLUMNS[column].get("stands_for")
        where = f"{column} (in place of {place})" if place else column
        pairs.append(Contest(f"{column}/{better}", f"{column}/{worse}", where, bool(place)))
    return pairs


def _gammas(experiment: Experiment, results: Results, cell: str) -> tuple[str, list[list[float]]]:
    scale, group = results.best(experiment, cell)
    found = [r["metrics"]["gamma"][-1] for r in group.done if "gamma" in r.get("metrics", {})]
    return scale, found


SMALL, LARGE = 1.0, 10.0


def _ratios(gammas: list[list[float]], at: float) -> list[float]:
    """P(λ)/λ."""
    return [float(transformation(gamma, torch.tensor(at, dtype=torch.float64))) / at for gamma in gammas]


Check = Callable[[list[list[float]]], tuple[bool, str, int]]  # γ of all runs of a cell -> whether it holds, line, n


def _by_column(experiment: Experiment, results: Results, check: Check, note: str = "") -> Finding:
    """A statement on the learned coefficients, checked in every column with at least two runs."""
    checked, scales = [], []
    for cell in experiment.cells:
        scale, gammas = _gammas(experiment, results, cell.name)
        if len(gammas) >= 2:
            holds, line, n = check(gammas)
            checked.append((holds, f"{cell.name.removesuffix('/gam')}: {line}", n))
            scales.append(scale)
    if not checked:
        return NOTHING
    scale = "full" if all(s == "full" for s in scales) else "small"
    part = f"holds in {sum(holds for holds, _, _ in checked)} of {len(checked)} columns"
    details = f"{part}{note}; {'; '.join(line for _, line, _ in checked)}"
    return Finding(all(holds for holds, _, _ in checked), details, min(n for *_, n in checked), scale, part=part)


def _ends(mean: Mean) -> str:
    return "no interval" if mean.low is None else f"{mean.low:.3g} to {mean.high:.3g}"


def _sharpens(experiment: Experiment, results: Results) -> Finding:
    def check(gammas: list[list[float]]) -> tuple[bool, str, int]:
        large, small = mean_of(_ratios(gammas, LARGE)), mean_of(_ratios(gammas, SMALL))
        holds = large.low is not None and large.low > 1 and large.value > small.value
        line = f"P(10)/10 = {large.value:.3g} ({_ends(large)}, n = {large.n}), P(1)/1 = {small.value:.3g}"
        return holds, line, large.n

    return _by_column(experiment, results, check)


def _contrast(experiment: Experiment, results: Results) -> Finding:
    """(P(10)/10) / (P(1)/1), for SAM γ = 0.1: (1 + 1)/(1 + 0.1)."""
    sam = (1 + 0.1 * LARGE) / (1 + 0.1 * SMALL)

    def check(gammas: list[list[float]]) -> tuple[bool, str, int]:
        pairs = zip(_ratios(gammas, LARGE), _ratios(gammas, SMALL), strict=True)
        mean = mean_of([large / small for large, small in pairs])
        return mean.low is not None and mean.low > sam, f"{mean.value:.3g} ({_ends(mean)}, n = {mean.n})", mean.n

    return _by_column(experiment, results, check, f", above SAM's {sam:.3g}")


def _periodic(experiment: Experiment, results: Results) -> Finding:
    """At period 10: less time than at 1, and still above SAM and SGD."""
    scale, late = results.best(experiment, "period-10")
    always, sam, sgd = (results.of(experiment, c, scale or "full") for c in ("period-1", "sam-0.01", "sgd"))
    groups = (late, always, sam, sgd)
    accuracy, seconds = ([m.value for g in groups if (m := g.mean(metric))] for metric in ("test_accuracy", "seconds"))
    if len(accuracy) < 4 or len(seconds) < 4:
        return NOTHING
    ours = contests([Contest("period-10", "sam-0.01", "above SAM 0.01"), Contest("period-10", "sgd", "above SGD")])
    above = ours(experiment, results)
    times = [s / seconds[3] for s in seconds]
    gain, late_gain = accuracy[1] - accuracy[3], accuracy[0] - accuracy[3]
    none = f"no gain over SGD to keep ({100 * gain:+.2f} points at period 1, {100 * late_gain:+.2f} at 10)"
    kept = f"{100 * late_gain / gain:.0f} % of the gain over SGD kept" if gain > 0 else none
    details = f"{kept}, at {times[0]:.2f}x SGD's time against {times[1]:.2f}x"
    holds = bool(above.holds) and times[0] < times[1]
    return Finding(holds, f"{details}; {above.details}", above.n, scale)


def _unstable(experiment: Experiment, results: Results) -> Finding:
    """Large T: runs that collapse (NaN, or less than half the accuracy of T = 2)."""
    scale, usual = results.best(experiment, "T/2")
    large = {T: results.of(experiment, f"T/{T}", scale or "full") for T in TS if T > 2}
    base = usual.mean("test_accuracy")
    if base is None or base.error is None or not any(group.records for group in large.values()):
        return NOTHING
    lines, total = [f"T = 2: {100 * base.value:.2f} ± {100 * base.error:.2f}"], 0
    for T, group in large.items():
        mean = group.mean("test_accuracy")
        collapsed = lost(group, base.value)
        total += collapsed
        if group.records:
            shown = "none finished" if mean is None else f"{100 * mean.value:.2f} ± {100 * (mean.error or 0):.2f}"
            some = f", {collapsed} of {len(group.records)} collapsed" if collapsed else ""
            lines.append(f"T = {T}: {shown}{some}")
    return Finding(total > 0, "; ".join(lines), base.n, scale)


def _early(experiment: Experiment, results: Results) -> Finding:
    """GAM behind Adam after the first epoch, ahead after the last, in at least one column: the paper says "may"."""
    lines, both, n = [], 0, []
    for column in _OURS:
        gam, sgd = (results.of(experiment, f"{column}/{row}").done for row in ("gam", "sgd"))
        pairs = [(g["epochs"]["test_accuracy"], s["epochs"]["test_accuracy"]) for g in gam for s in sgd
                 if g["seed"] == s["seed"]]  # fmt: skip
        if len(pairs) > 1:
            first, last = (mean_of([g[i] - s[i] for g, s in pairs]).value for i in (0, -1))
            both += first < 0 < last
            n.append(len(pairs))
            lines.append(f"{column}: {100 * first:+.2f} points after the first epoch, {100 * last:+.2f} after the last")
    return (
        Finding(both > 0, f"holds in {both} of {len(lines)} columns; {'; '.join(lines)}", min(n)) if lines else NOTHING
    )


def _follows(experiment: Experiment, results: Results) -> Finding:
    scale, group = results.best(experiment, "quadratic")
    if not group.records:
        return NOTHING
    values = [record["values"] for record in group.records]
    before, after = ([v[f"distance_{when}"] for v in values] for when in ("before", "after"))
    end = mean_of(after)
    ends = "no interval" if end.low is None else f"{end.low:.3f} to {end.high:.3f}"
    details = f"root mean square distance to the true eigenvalues {mean_of(before).value:.3f} as observed, "
    details += f"{end.value:.3f} ({ends}) as transformed, in {values[0]['iterations']:,} iterations"
    return Finding(all(a < b / 5 for a, b in zip(after, before, strict=True)), details, len(values), scale)


def _insensitive(experiment: Experiment, results: Results) -> Finding:
    """From ε = 1e-4 to 1e-2 no two means are further apart than two combined standard errors."""
    scale, _ = results.best(experiment, "eps/0.001")
    means = [results.of(experiment, f"eps/{e}", scale or "full").mean("test_accuracy") for e in EPSILONS[1:4]]
    known = [mean for mean in means if mean is not None and mean.error is not None]
    if len(known) < 3:
        return NOTHING
    low, high = min(known, key=lambda m: m.value), max(known, key=lambda m: m.value)
    apart = (high.value - low.value) / (math.hypot(low.error or 0, high.error or 0) or math.inf)
    details = ", ".join(
        f"ε = {e}: {100 * m.value:.2f} ± {100 * (m.error or 0):.2f}" for e, m in zip(EPSILONS[1:4], known, strict=True)
    )
    return Finding(apart <= NEAR, f"{details}; at most {apart:.1f} combined standard errors apart", known[0].n, scale)


_CNNS = [column for column in _OURS if column.endswith(("cnn-5", "cnn-14"))]
_MLPS = [column for column in _OURS if column.endswith("mlp-3")]
TRENDS = (
    Trend("gam-above-sgd", "s0/table1", "GAM is above SGD in every column", contests(_pairs("gam", "sgd", _OURS))),
    Trend("gam-above-sam", "s0/table1", "GAM is above SAM (0.1, its best row) in every column",
          contests(_pairs("gam", "sam-0.1", _OURS))),
    Trend("sam-above-sgd", "s0/table1", "SAM 0.1 is above SGD in every column",
          contests(_pairs("sam-0.1", "sgd", _OURS))),
    Trend("crsam-wins-cnns", "s0/table1", "CR-SAM is above GAM on the CNNs of CIFAR-10 and SVHN",
          contests(_pairs("crsam", "gam", _CNNS))),
    Trend("gam-wins-mlps", "s0/table1", "GAM is above CR-SAM on the MLPs",
          contests(_pairs("gam", "crsam", _MLPS))),
    Trend("sharpens", "s0/fig2", "GAM sharpens sharp directions: P(λ) > λ for large λ, more than for small", _sharpens),
    Trend("contrast", "s0/fig2", "GAM's contrast between large and small curvature is above SAM's", _contrast),
    Trend("periodic", "s0/fig3", "γ updated periodically costs less and stays above SAM and SGD", _periodic),
    Trend("quadratic", "s0/fig4", "The learned P(λ̃) follows the true eigenvalues", _follows),
    Trend("early", "s0/fig5", "GAM may be behind early in training and ahead at the end", _early),
    Trend("unstable", "s0/fig6", "GAM can become unstable for large T", _unstable),
    Trend("insensitive", "s0/fig6", "GAM is relatively insensitive to ε", _insensitive),
    Trend("small-batches", "s0/fig6", "GAM is best at small batches",
          falls_along([f"batch/{b}" for b in BATCHES], "test_accuracy")),
    *s0_theorem.TRENDS,
)  # fmt: skip
