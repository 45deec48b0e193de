"""The options that commands share: tables for groups of options, and types for single ones.

A new option of the training commands (`compare`, `train`, `sweep`) touches two files: a row of `RECIPE` here and the
field of the same name in `lab/recipe/recipe.py`; or, if it changes no result, a row of `PLACE` here and the field of
the same name in `Place` (lab/runner/jobs.py). The commands, `steppe sweep`'s advice and the documentation follow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from ..support.devices import best_device

Row: TypeAlias = tuple[Any, Any, str]  # type, default, help
Table: TypeAlias = dict[str, Row]
LOSSES = ("cross_entropy", "mse")
DEVICE = "auto (the fastest there is), cpu, cuda, cuda:1 or mps."
THREADS = "CPU threads per process. Another number changes results by rounding errors."

# Fields of a recipe. The default None means: the value that is suggested for the data set and the model.
RECIPE: Table = {
    "data": (
        str | None,
        None,
        "Data set: a name from `steppe list data` (default: digits), or your own function, package.module:function.",
    ),
    "model": (
        str | None,
        None,
        "Model: a name from `steppe list models`, timm:NAME, or your own function, package.module:function.",
    ),
    "task": (str | None, None, "classification, regression, multi-label or language (predict the next token)."),
    "loss": (str | None, None, "Your own loss, a function of (outputs, targets): package.module:function."),
    "metric": (
        str | None,
        None,
        "Your own metric, a function of all test (outputs, targets): mine:score, or mine:error:lower if lower is "
        "better.",
    ),
    "base": (
        str | None,
        None,
        "Base optimizer: a name from torch.optim, timm or pytorch-optimizer (sgd, adamw, ...), muon+adamw, or your "
        "own function, package.module:function.",
    ),
    "base_settings": (str | None, None, "Further settings of the base optimizer: betas=(0.9,0.95),eps=1e-6."),
    "lr": (float | None, None, "Learning rate; with a schedule, its largest value."),
    "momentum": (float | None, None, "Momentum, for sgd and other bases that take one."),
    "nesterov": (bool | None, None, "Use Nesterov momentum."),
    "weight_decay": (float | None, None, "Weight decay of the base optimizer."),
    "batch": (int | None, None, "Batch size, in examples."),
    "epochs": (int | None, None, "Number of epochs."),
    "schedule": (
        str | None,
        None,
        "Learning rate schedule: constant, cosine, linear, onecycle, triangle, step:0.25/10 (times 0.25 every 10 "
        "epochs), or multistep:0.2/0.3,0.6,0.8 (times 0.2 after 30, 60 and 80 % of training).",
    ),
    "warmup": (int | None, None, "Number of steps over which the learning rate rises from zero."),
    "augment": (
        str | None,
        None,
        "Augmentation: none, basic (crop=4+flip), or any of crop=4, flip, alternating-flip, translate=2, cutout=16, "
        "randaugment=2/9 and autoaugment, joined by +.",
    ),
    "mixup": (float | None, None, "Mixup: alpha of its Beta distribution; 0 for no mixup."),
    "precision": (
        str | None,
        None,
        "float32, tf32, bf16, fp16 (dynamic loss scale), fp16-fixed (loss scale 1024) or float64.",
    ),
    "clip": (float | None, None, "Clip the norm of the update direction to this value; 0 for no clipping."),
    "share": (float | None, None, "Share of the training data to use, from its start: 0.1 is the first tenth."),
    "label_noise": (float | None, None, "Share of the training labels to replace by wrong ones, from 0 to 1."),
    "auxiliary": (
        str | None,
        None,
        "Second batch, for methods that use one: fresh, fixed, previous, held-out:500 (from 500 held-out training "
        "examples) or in-turns (5 % of them, others from epochs 1, 2, 4, 8 … on). Default: fresh; for GapSAM held-out, "
        "or with less than 10,000 examples in-turns.",
    ),
    "average": (
        str | None,
        None,
        "Also evaluate averaged weights: ema:0.999 (moving average), ema:10% (over a tenth of training) or swa:0.75 "
        "(mean from 75 % of training on).",
    ),
    "label_smoothing": (float | None, None, "Label smoothing of the training loss, from 0 to 1."),
    "bias_lr": (float | None, None, "Learning rate of the biases of normalisation layers, as a multiple of --lr."),
    "model_settings": (str | None, None, "Settings of the model: hidden=256."),
}
FIELDS = {"augment": "augmentation"}  # options of RECIPE whose name differs from that of their field

# Where and how to train.
PLACE: Table = {
    "compile": (bool, False, "Compile the model with torch.compile."),
    "data_dir": (Path | None, None, "Folder of the data sets. Default: $STEPPE_DATA, else ~/.cache/steppe."),
    "download": (bool, False, "Download the data set if it is missing."),
    "device": (str, "auto", DEVICE),
    "threads": (int, 1, THREADS),
    "curvature": (bool, True, "Measure the curvature of the loss at the end of every run."),
    "log": (str, "", "Also log to tensorboard, wandb, mlflow, or your own logger, package.module:function."),
    "keep_weights": (bool, False, "Save the trained weights of every run beside its record."),
}

# A model with weights, and the loss that is measured or drawn.
OBJECTIVE: Table = {
    "model": (str, ..., "Function that returns the model: package.module:function."),
    "data": (
        str,
        ...,
        "Function that returns the data (package.module:function): a DataLoader, a pair of tensors, or what `steppe "
        "compare --data` takes.",
    ),
    "split": (str, "", "Which part of the data to use if it has two: train or test. Default: train."),
    "loss": (str, "cross_entropy", f"{', '.join(LOSSES)}, or your own function, package.module:function."),
    "params": (list[str], [], "Only parameters whose names match this pattern, such as 'layer1.*'. Repeatable."),
    "mode": (
        str,
        "eval",
        "Mode of the model: eval, train, batch (eval, but BatchNorm uses the batch's statistics), or as-is.",
    ),
    "samples": (int, 0, "Number of samples of the data to use; 0 for all."),
    "double": (bool, False, "Compute in float64."),
    "device": (str, "auto", DEVICE),
    "seed": (int, 0, "Seed of all random vectors, the same for every checkpoint."),
}

PANELS = {"recipe": "What is trained", "place": "Where and how", "objective": "What is measured"}  # groups in the help

Method = Annotated[
    str, typer.Option(help="Method with its settings: sam:rho=0.1. `steppe list methods` lists all methods.")
]
Seed = Annotated[int, typer.Option(help="Seed of the initial weights, the batches and all other random numbers.")]
Seeds = Annotated[int, typer.Option(help="Number of seeds: 3 means the seeds 0, 1 and 2.")]
Out = Annotated[Path, typer.Option(help="Folder for the records and the report.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")]
Jobs = Annotated[int | None, typer.Option(help="Number of worker processes. Default: one per core on a CPU, else 1.")]
On = Annotated[
    str,
    typer.Option(
        help="Where to train: local, ray, or queue (only write the runs to --out; `steppe work` trains them, on any "
        "number of machines)."
    ),
]
Address = Annotated[str, typer.Option(help="Address of a Ray cluster. Default: start a local one.")]
Together = Annotated[
    int | None,
    typer.Option(
        help="Number of runs that one process trains at once. Default: up to 20 seeds of the smallest nets as one, 10 "
        "other small nets in turn on a GPU, else 1."
    ),
]
Checkpoints = Annotated[list[Path], typer.Argument(help="Checkpoint files, each with a state dict of the model.")]


def takes(**tables: Table) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds the options of tables to a command, which gets each table's values as one dictionary.

    @takes(recipe=RECIPE, place=PLACE)
    def command(recipe: Any, place: Any, seed: Seed = 0) -> None: ...
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name not in tables]
        added = [_parameter(name, *row, PANELS[key]) for key, table in tables.items() for name, row in table.items()]
        parameters = [*own, *added]

        def called(**given: Any) -> None:
            grouped = {key: {name: given.pop(name) for name in table} for key, table in tables.items()}
            for table in grouped.values():
                if table.get("device") == "auto":
                    table["device"] = best_device()
            command(**given, **grouped)

        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__signature__ = inspect.Signature(parameters)
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        return called

    return give


def _parameter(name: str, kind: Any, default: Any, text: str, panel: str) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    value = inspect.Parameter.empty if default is ... else default
    option = typer.Option(help=text, rich_help_panel=panel)
    return inspect.Parameter(name, keyword, default=value, annotation=Annotated[kind, option])
