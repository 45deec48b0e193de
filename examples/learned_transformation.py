"""Let GAM learn how a test loss differs from a training loss, on a problem where the answer is known.

    python examples/learned_transformation.py                       # two minutes on one CPU core
    python examples/learned_transformation.py --iterations 5000     # seconds

This is Figure 4 of "Generalization Aware Minimization" (Appendices D and E.1). The training loss and the test loss
are quadratics with the same eigenvectors. Where the test loss has an eigenvalue λ, drawn from [1, 2], the training
loss has λ̃ = f(λ + noise), f(λ) = λ/2 + sin(10λ)/20. From gradients alone, GAM with T = 12 learns coefficients γ, and
with them P(λ̃) = λ̃ + Σ γ_t λ̃^{t+1}, the eigenvalue as its perturbed gradient sees it. P(λ̃) should become λ.

The losses and the loop are in `steppe.papers.quadratic`, which also lists what the paper does not specify. The loop
runs the method by hand, without a model and without autograd, in the basis of the eigenvectors: a method is a
generator that asks for gradients, and anything that can compute them can run it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from steppe.methods.gam import transformation
from steppe.papers.quadratic import Quadratics, f, learn, paper_method


def progress(count: int) -> Iterator[int]:
    """0, 1, …, count − 1, with a bar if rich is installed."""
    try:
        from rich.progress import track
    except ImportError:
        for i in range(count):
            if i % max(count // 10, 1) == 0:
                print(f"{i} of {count} iterations", flush=True)
            yield i
    else:
        yield from track(range(count), description="Learning γ")


def draw(problem: Quadratics, gamma: Tensor, iterations: int, path: Path) -> None:
    true, observed = problem.true, problem.observed
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(6.4, 5.2), sharex=True, height_ratios=(5, 1), layout="constrained"
    )
    line = torch.linspace(0.97, 2.03, 600, dtype=true.dtype)
    seen = f(line)
    low, high = observed.min(), observed.max()
    top.axvspan(float(low), float(high), color="0.95", zorder=0)
    top.plot(seen, line, color="tab:blue", lw=2.5, label="true: λ")
    inside = (seen >= low) & (seen <= high)
    learned = transformation(gamma, seen)
    top.plot(seen, learned, color="tab:red", lw=1, ls=":")
    top.plot(seen[inside], learned[inside], color="tab:red", lw=2, label="learned: P(λ̃)")
    top.plot(seen, seen, color="0.4", lw=1.2, ls="--", label="without GAM: λ̃")
    top.plot(observed, true, "o", color="tab:blue", ms=4.5, mec="white", mew=0.6)
    top.set_ylim(0.4, 2.15)
    top.set_ylabel("eigenvalue of the test loss")
    top.set_title(f"What GAM learned in {iterations:,} iterations", loc="left", fontsize=11)
    top.legend(frameon=False, loc="upper left")
    bottom.hist(observed, bins=12, color="tab:blue", alpha=0.3)
    bottom.eventplot(observed, lineoffsets=0.3, linelengths=0.6, colors="tab:blue", linewidths=1.2)
    bottom.set_ylim(bottom=0)
    bottom.set_yticks([])
    bottom.spines["left"].set_visible(False)
    bottom.set_xlabel("λ̃, eigenvalue of the training loss (bars: how many were observed)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/learned_transformation.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # the vectors have fifteen entries
    problem = Quadratics.drawn(args.seed)
    started = time.perf_counter()
    gamma = learn(problem, paper_method(), progress(args.iterations))
    seconds = time.perf_counter() - started
    print(f"γ = {', '.join(f'{g:.2f}' for g in gamma)}   ({seconds:.0f} s)")
    print(f"distance to the true eigenvalues: {problem.distance(problem.observed):.3f} as observed,", end=" ")
    print(f"{problem.distance(transformation(gamma, problem.observed)):.3f} as transformed (root mean square)")
    draw(problem, gamma, args.iterations, args.output)
    print(f"figure: {args.output}")


if __name__ == "__main__":
    main()
