"""The `measure` and `landscape` commands."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..curvature import figures
from ..curvature.density import spectrum
from ..curvature.eigen import eigenvalues
from ..curvature.estimates import Estimate, as_json, difference
from ..curvature.flatness import first_order, surrogate_gap, zeroth_order
from ..curvature.krylov import Krylov
from ..curvature.landscape import line, plane
from ..curvature.objective import Objective
from ..curvature.operator import Hessian
from ..curvature.trace import FEWEST_PRODUCTS, frobenius_squared, trace
from .resuming import Partial, digest

if TYPE_CHECKING:
    import typer

_WHAT = ("eigenvalues", "trace", "frobenius", "density", "flatness")
_LOSSES = {"cross_entropy": nn.functional.cross_entropy, "mse": nn.functional.mse_loss}


class CommandError(Exception):
    """Something on the command line that the user can put right."""


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    import typer

    from .errors import OneLine

    checkpoint_files: Any = typer.Argument(..., help="Checkpoints, each with a state dict of the model.")
    from_model: Any = typer.Option(..., "--model", help="package.module:function that returns the model.")
    from_data: Any = typer.Option(..., "--data", help="package.module:function: a loader, or a pair of tensors.")
    from_loss: Any = typer.Option("cross_entropy", "--loss", help="cross_entropy, mse, or package.module:function.")
    some_params: Any = typer.Option([], "--params", help="Only parameters whose names match, such as 'layer1.*'.")
    in_mode: Any = typer.Option("eval", "--mode", help="eval, batch (BatchNorm by the batch), train, or as-is.")
    so_many: Any = typer.Option(0, "--samples", help="Use so many samples of the data; 0 for all.")
    in_double: Any = typer.Option(False, "--double", help="Measure in float64.")
    on_device: Any = typer.Option("cpu", "--device", help="cpu, cuda, cuda:1, mps.")
    with_seed: Any = typer.Option(0, "--seed", help="Of all random vectors; the same for every checkpoint.")
    some_measures: Any = typer.Option([], "--what", help=f"Any of {', '.join(_WHAT)}; all but flatness by default.")

    @app.command(cls=OneLine)
    def measure(
        checkpoints: list[Path] = checkpoint_files,
        model: str = from_model,
        data: str = from_data,
        loss: str = from_loss,
        what: list[str] = some_measures,
        top: int = typer.Option(5, help="How many eigenvalues."),
        rtol: float = typer.Option(0.01, help="Relative standard error to stop at."),
        rho: float = typer.Option(0.05, help="Radius for flatness."),
        max_matvecs: int = typer.Option(2000, help="Products per measure at most."),
        params: list[str] = some_params,
        mode: str = in_mode,
        samples: int = so_many,
        double: bool = in_double,
        device: str = on_device,
        out: Path = typer.Option(Path("curvature"), help="The folder for JSON and figures."),  # noqa: B008
        resume: bool = typer.Option(True, help="Go on where the same command was stopped before."),
        seed: int = with_seed,
    ) -> None:
        """Measure how curved the loss is at one or more checkpoints, with error bars."""
        asked = {**locals(), "out": "", "resume": True}
        with _helpful(typer), _stoppable(typer, out):
            wanted = list(what) or [w for w in _WHAT if w != "flatness"]
            if unknown := [w for w in wanted if w not in _WHAT]:
                raise CommandError(f"--what knows {', '.join(_WHAT)}, not {unknown[0]}")
            for option, value in (("--rtol", rtol), ("--rho", rho), ("--top", top), ("--max-matvecs", max_matvecs)):
                if not (math.isfinite(value) and value > 0):
                    raise CommandError(f"{option} must be positive, not {value}")
            if max_matvecs < FEWEST_PRODUCTS and {"trace", "frobenius"} & set(wanted):  # before hours of others
                raise CommandError(f"--max-matvecs must be at least {FEWEST_PRODUCTS} for trace and frobenius")
            found, drawn, partials = {}, {}, []
            for path, (name, objective) in zip(
                checkpoints,
                _objectives(checkpoints, model, data, loss, params, mode, samples, double, device, seed),
                strict=True,
            ):
                typer.echo(f"measuring {name}: {objective.size:,} weights", err=True)
                partial = _partial(out, path, objective, asked, resume, typer)
                partials.append(partial)
                found[name], drawn[name] = _measure(objective, wanted, top, rtol, rho, max_matvecs, seed, partial)
            written = _write(found, drawn, out)
            _print_table(found)
            _print_differences(found)
            print("\n".join(written))
            for partial in partials:
                partial.remove()

    @app.command(cls=OneLine)
    def landscape(
        checkpoints: list[Path] = checkpoint_files,
        model: str = from_model,
        data: str = from_data,
        loss: str = from_loss,
        dimensions: int = typer.Option(2, help="1 for a line, 2 for a surface."),
        along: str = typer.Option("random", help="random (filter-normalised) or eigenvectors."),
        reach: float = typer.Option(1.0, help="How far to go from the weights, both ways."),
        points: int = typer.Option(25, help="Points per axis, an odd number."),
        html: bool = typer.Option(True, help="Also an interactive surface (needs plotly)."),
        params: list[str] = some_params,
        mode: str = in_mode,
        samples: int = so_many,
        double: bool = in_double,
        device: str = on_device,
        out: Path = typer.Option(Path("landscape"), help="The folder for figures."),  # noqa: B008
        seed: int = with_seed,
    ) -> None:
        """Draw the loss around one or more checkpoints: PNG, SVG, and an interactive HTML surface."""
        with _helpful(typer):
            if dimensions not in (1, 2):
                raise CommandError("--dimensions must be 1 or 2")
            if along not in ("random", "eigenvectors"):
                raise CommandError("--along must be random or eigenvectors")
            named = dict(_objectives(checkpoints, model, data, loss, params, mode, samples, double, device, seed))
            written = _draw(named, dimensions, along, reach, points, html, out, seed)
            for path in written:
                typer.echo(f"wrote {path}")


@contextmanager
def _helpful(typer: Any) -> Iterator[None]:
    """One line in place of a traceback for everything that the user can put right."""
    from .errors import os_error

    try:
        yield
    except (CommandError, ValueError, TypeError, ImportError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    except BrokenPipeError:  # the reader of our output has had enough: typer knows
        raise
    except OSError as error:
        typer.echo(f"error: {os_error(error)}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def _stoppable(typer: Any, out: Path) -> Iterator[None]:
    """Ctrl-C says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            f"stopped: what was found is kept in {out / '.partial'}; run the same command again to go on, "
            "with --no-resume to start over",
            err=True,
        )
        raise typer.Exit(130) from None


def _partial(out: Path, path: Path, objective: Objective, asked: dict[str, Any], resume: bool, typer: Any) -> Partial:
    """What was found before, if the same was asked of the same file, model and data."""
    loss = f"{float(objective.loss()):.5g}"
    of = {"weights": digest(path), "loss": loss, "asked": {k: str(v) for k, v in sorted(asked.items())}}
    one = hashlib.sha256(json.dumps(of).encode()).hexdigest()  # another question has a folder of its own
    folder = out / ".partial" / one[:16]
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        partial = Partial(folder, of)
    for each in told:
        typer.echo(f"warning: {each.message}", err=True)
    if partial.resumed:
        typer.echo(f"  going on: {', '.join(partial.resumed)} were found before", err=True)
    return partial


def _objectives(
    checkpoints: list[Path], model: str, data: str, loss: str, params: list[str], mode: str, samples: int,
    double: bool, device: str, seed: int,
) -> Iterator[tuple[str, Objective]]:  # fmt: skip
    build, load = _import(model, "--model"), _import(data, "--data")
    loss_fn = _LOSSES.get(loss) or _import(loss, "--loss")
    try:
        where = torch.device(device)
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from None
    names = [path.stem for path in checkpoints]
    if len(set(names)) < len(names):
        names = [str(path) for path in checkpoints]
    batches = _call(load, "--data")
    for name, path in zip(names, checkpoints, strict=True):
        net = _call(build, "--model")
        if not isinstance(net, nn.Module):
            raise CommandError(f"--model {model} returned a {type(net).__name__}, not a torch.nn.Module")
        _load_weights(net, path)
        net = net.to(where, torch.float64 if double else None)
        options: dict[str, Any] = {"params": params or None, "mode": mode, "samples": samples or None, "seed": seed}
        objective = Objective(net, loss_fn, batches, **options)
        try:
            objective.loss()
        except (RuntimeError, LookupError, AttributeError, AssertionError) as error:
            said = (str(error).splitlines() or [""])[0]
            said = said if isinstance(error, (RuntimeError, IndexError)) else f"{type(error).__name__}: {said}"
            raise CommandError(f"--model, --data and --loss do not fit together: {said}") from None
        yield name, objective


def _import(spec: str, option: str) -> Callable[..., Any]:
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise CommandError(f"{option} {spec!r} is not of the form package.module:function")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # as python -m does: modules in the folder that the command is run from
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever the user's module does when it is imported
        raise CommandError(f"{option}: cannot import {module}: {error}") from None
    function = getattr(found, name, None)
    if not callable(function):
        raise CommandError(f"{option}: {module} has no function called {name}")
    return function


def _call(function: Callable[[], Any], option: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise CommandError(f"{option}: {function.__name__}() failed: {type(error).__name__}: {error}") from None


def _load_weights(model: nn.Module, path: Path) -> None:
    if not path.exists():
        raise CommandError(f"there is no checkpoint {path}")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        raise CommandError(f"{path} cannot be read as a checkpoint of tensors: save model.state_dict()") from None
    state = loaded
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise CommandError(f"{path} holds no state dict")
    for prefix in ("module.", "_orig_mod.", "module."):  # DDP around torch.compile, or the other way round
        if not any(key.startswith(prefix) for key in model.state_dict()):  # as AveragedModel's keys do
            state = {str(key).removeprefix(prefix): value for key, value in state.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CommandError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from None


def _measure(
    objective: Objective, wanted: list[str], top: int, rtol: float, rho: float, max_matvecs: int, seed: int,
    partial: Partial,
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """All results of one model, for the table; and those with figures. One Krylov run serves them."""
    operator = Hessian(objective)
    found: dict[str, Any] = {"loss": Estimate.exact(float(objective.loss()))}
    drawn: dict[str, Any] = {}
    run = Krylov(operator, block=16 if "density" in wanted else 8, seed=seed, checkpoint=partial.file("run.pt"))
    if "density" in wanted:
        drawn["density"] = partial.once("density", lambda: spectrum(run))
        drawn["log_det"] = drawn["density"].log_det()
    if "eigenvalues" in wanted:
        many = min(top, run.size)
        best = partial.once("eigenvalues", lambda: eigenvalues(run, many, max_matvecs=max_matvecs))
        drawn["eigenvalues"] = best
        for index, (value, error) in enumerate(zip(best.values.tolist(), best.errors.tolist(), strict=True), start=1):
            cost = {"matvecs": best.matvecs, "seconds": best.seconds, "seed": seed, "method": "lanczos"}
            ok = bool(best.converged[index - 1])
            found[f"λ{index}"] = Estimate(value, error, value - error, value + error, ok, how=best.how, **cost)
    limits: dict[str, Any] = {"rtol": rtol, "max_matvecs": max_matvecs, "seed": seed}
    if "trace" in wanted:
        found["trace"] = partial.once("trace", lambda: trace(run, checkpoint=partial.file("trace.pt"), **limits))
    if "frobenius" in wanted:
        found["‖H‖²_F"] = partial.once(
            "frobenius", lambda: frobenius_squared(run, checkpoint=partial.file("frobenius.pt"), **limits)
        )
    if "flatness" in wanted:
        gap = surrogate_gap(objective, rho)
        found[f"surrogate gap (ρ={rho:g})"] = Estimate.exact(gap.gap)
        found["cos θ"] = Estimate.exact(gap.cosine)
        for sign, measure in (("⁰", zeroth_order), ("¹", first_order)):
            bound = partial.once(measure.__name__, lambda measure=measure: measure(objective, rho, seed=seed).value)
            found[f"R⁽{sign}⁾ ≥ (ρ={rho:g})"] = Estimate.exact(bound)
    costs = [one.matvecs for one in (drawn.get("density"), drawn.get("eigenvalues")) if one is not None]
    costs += [found[name].matvecs for name in ("trace", "‖H‖²_F") if name in found]
    found["products"] = Estimate.exact(float(sum(costs)))
    return found, drawn


def _cell(one: Estimate) -> str:
    error = f" ± {one.standard_error:.1g}" if one.standard_error else ""
    return f"{one.value:.5g}{error}{'' if one.converged else ' !'}"


def _print_table(found: dict[str, dict[str, Estimate]]) -> None:
    rows = [[name, *(_cell(one[name]) for one in found.values())] for name in next(iter(found.values()))]
    _print_rows(["measure", *found], rows)
    if any(not each.converged for one in found.values() for each in one.values()):
        print("! the requested error was not reached: raise --max-matvecs or --rtol")


def _print_differences(found: dict[str, dict[str, Estimate]]) -> None:
    """Every checkpoint against the first, from the same random vectors."""
    names = list(found)
    if len(names) < 2:
        return
    rows = []
    for other in names[1:]:
        for name, one in found[names[0]].items():
            if name in ("products",):
                continue
            change = difference(found[other][name], one)
            clear = "" if change.low <= 0 <= change.high else "*"
            rows.append([f"{other} − {names[0]}", name, _cell(change), clear])
    print()
    _print_rows(["difference", "measure", "value", "clear of 0"], rows)


def _print_rows(head: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in [head, *rows]:
            print("  ".join(f"{cell:<22}" for cell in row))
        return
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _write(found: dict[str, Any], drawn: dict[str, dict[str, Any]], out: Path) -> list[str]:
    """Write what was found; return what to say about it."""
    out.mkdir(parents=True, exist_ok=True)
    extra = {name: {k: v for k, v in one.items() if k != "density"} for name, one in drawn.items()}
    path = out / "curvature.json"
    text = json.dumps({"measures": as_json(found), "details": as_json(extra)}, indent=1, ensure_ascii=False)
    path.write_text(text, encoding="utf-8")
    said = [f"wrote {path}"]
    makers: dict[str, Callable[..., Any]] = {
        "density": figures.density_figure,
        "log_det": figures.log_det_figure,
        "eigenvalues": lambda many: figures.top_figure({name: one.values for name, one in many.items()}),
    }
    try:
        for key, make in makers.items():
            many = {name: one[key] for name, one in drawn.items() if key in one}
            if many:
                said.append(f"wrote {figures.save(make(many), out / f'{key}.png')}")
    except ImportError:
        said.append("no figures: install matplotlib for them")
    return said


def _draw(
    named: dict[str, Objective],
    dimensions: int,
    along: str,
    reach: float,
    points: int,
    html: bool,
    out: Path,
    seed: int,
) -> list[Path]:
    vectors = {}
    if along == "eigenvectors":
        for name, objective in named.items():
            best = eigenvalues(Hessian(objective), dimensions, seed=seed)
            vectors[name] = [objective.vector(v) for v in best.vectors.T]
    axis = "top eigenvector" if vectors else "filter-normalised random direction"
    out.mkdir(parents=True, exist_ok=True)
    try:
        if dimensions == 1:
            ways = {name: each[0] for name, each in vectors.items()} or None
            figure = figures.line_figure(line(named, ways, reach=reach, points=points, axis=axis, seed=seed))
            return [figures.save(figure, out / f"line.{kind}") for kind in ("png", "svg")]
        written = []
        stems = dict(zip(named, _apart([Path(name).name for name in named]), strict=True))
        for name, objective in named.items():
            axes = ("first eigenvector", "second eigenvector") if vectors else ("first direction", "second direction")
            ways = (vectors[name][0], vectors[name][1]) if vectors else None
            found = plane(objective, ways, reach=reach, points=points, axes=axes, seed=seed)
            stem = stems[name]
            for kind, make in (("contour", figures.contour_figure), ("surface", figures.surface_figure)):
                written += [figures.save(make(found), out / f"{stem}-{kind}.{ending}") for ending in ("png", "svg")]
            written += _interactive(found, out / f"{stem}.html") if html else []
        return written
    except ImportError as error:
        raise CommandError(f"figures need matplotlib ({error})") from None


def _apart(names: list[str]) -> list[str]:
    """Names for files: those that several have are numbered."""
    return [name if names.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(names, start=1)]


def _interactive(found: Any, path: Path) -> list[Path]:
    try:
        figures.surface_html(found, path)
    except ImportError:
        print("no interactive surface: install plotly for it, or say --no-html", file=sys.stderr)
        return []
    return [path]
