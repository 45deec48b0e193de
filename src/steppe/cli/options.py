"""The options that commands share: tables for groups of options, and types for single ones.

A new option of the training commands (`compare`, `train`, `sweep`) touches two files: a row of `RECIPE` here and the
field of the same name in `lab/recipe/recipe.py`; or, if it changes no result, a row of `PLACE` here and the field of
the same name in `Place` (lab/runner/local.py). The commands, `steppe sweep`'s advice and the documentation follow.
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

# Fields of a recipe. None: what is suggested for the data set and the model.
RECIPE: Table = {
    "data": (str | None, None, "A data set (`steppe list data`) or your own, package.module:function."),
    "model": (str | None, None, "A model (`steppe list models`) or your own, package.module:function."),
    "task": (str | None, None, "classification, regression, multi-label or language (next tokens)."),
    "loss": (str | None, None, "Your own loss of (outputs, targets), package.module:function."),
    "metric": (str | None, None, "Your own metric; mine:error:lower if lower is better."),
    "base": (
        str | None,
        None,
        "Base optimizer: any of torch.optim, timm or pytorch-optimizer by name, muon+adamw, or your own function.",
    ),
    "base_settings": (str | None, None, "Settings of the base: betas=(0.9,0.95),eps=1e-6"),
    "lr": (float | None, None, "Learning rate."),
    "momentum": (float | None, None, "Momentum of sgd and others that take it."),
    "nesterov": (bool | None, None, "Nesterov's momentum."),
    "weight_decay": (float | None, None, "Weight decay."),
    "batch": (int | None, None, "Batch size."),
    "epochs": (int | None, None, "Epochs."),
    "schedule": (
        str | None,
        None,
        "constant, cosine, linear, onecycle, triangle, or step:0.25/10 (x 0.25 every 10 epochs).",
    ),
    "warmup": (int | None, None, "Steps in which the learning rate rises from zero."),
    "augment": (
        str | None,
        None,
        "Augmentation: none, basic, translate=2, alternating-flip, cutout, randaugment, autoaugment, joined by +.",
    ),
    "mixup": (float | None, None, "Mixup's alpha; 0 for none."),
    "precision": (str | None, None, "float32, tf32, bf16, fp16, fp16-fixed (a loss scale of 1024) or float64."),
    "clip": (float | None, None, "Clip the direction to this norm; 0 for no clipping."),
    "share": (float | None, None, "Train on the first part of the data, this share of it."),
    "label_noise": (float | None, None, "Share of the training labels that are replaced by wrong ones."),
    "auxiliary": (str | None, None, "Second batch, of methods that use one: fresh, fixed, previous, held-out:500."),
    "average": (
        str | None,
        None,
        "Evaluate an average of the weights too: ema:0.999, ema:10% (over a tenth of training) or swa:0.75.",
    ),
    "label_smoothing": (float | None, None, "Label smoothing of the training loss."),
    "bias_lr": (float | None, None, "Learning rate of normalisation layers' biases, relative to --lr."),
    "model_settings": (str | None, None, "Settings of the model: hidden=256,..."),
}
FIELDS = {"augment": "augmentation"}  # the options of RECIPE that are named otherwise than their field

# Where and how to train.
PLACE: Table = {
    "compile": (bool, False, "Compile the model."),
    "data_dir": (Path | None, None, "Folder of the data sets; by default $STEPPE_DATA, else ~/.cache/steppe."),
    "download": (bool, False, "Download a data set that is not there."),
    "device": (str, "auto", "auto, cpu, cuda, cuda:1, mps."),
    "threads": (int, 1, "Threads of a process on a CPU. Another number rounds differently."),
    "curvature": (bool, True, "Measure curvature at the end of every run."),
    "log": (str, "", "tensorboard, wandb, mlflow, or your own logger, package.module:function."),
    "keep_weights": (bool, False, "Save the trained weights beside the record."),
}

# A model with weights, and the loss that is measured or drawn.
OBJECTIVE: Table = {
    "model": (str, ..., "package.module:function that returns the model."),
    "data": (str, ..., "package.module:function that returns a loader, a pair of tensors, or what `compare` takes."),
    "split": (str, "", "train or test, of data that has both; by default train."),
    "loss": (str, "cross_entropy", f"{', '.join(LOSSES)}, or package.module:function."),
    "params": (list[str], [], "Only parameters whose names match, such as 'layer1.*'."),
    "mode": (str, "eval", "eval, batch (BatchNorm by the batch), train, or as-is."),
    "samples": (int, 0, "Use only this many samples of the data; 0 for all."),
    "double": (bool, False, "Compute in float64."),
    "device": (str, "auto", "auto, cpu, cuda, cuda:1, mps."),
    "seed": (int, 0, "Seed of all random vectors; the same for every checkpoint."),
}

PANELS = {"recipe": "What is trained", "place": "Where and how", "objective": "What is measured"}  # groups in the help

Method = Annotated[str, typer.Option(help="What to train with: sam:rho=0.1. `steppe list methods` lists all.")]
Seed = Annotated[int, typer.Option(help="Seed of the first weights, the batches and every other random draw.")]
Seeds = Annotated[int, typer.Option(help="How many seeds, from 0.")]
Out = Annotated[Path, typer.Option(help="The folder for records and the report.")]
Json = Annotated[bool, typer.Option("--json", help="Print the table as JSON.")]
Jobs = Annotated[int | None, typer.Option(help="Processes at a time. On a CPU by default one per core.")]
On = Annotated[
    str, typer.Option(help="local, ray, or queue: leave the runs in --out to `steppe work` on many machines.")
]
Address = Annotated[str, typer.Option(help="Address of a Ray cluster; by default a local one is started.")]
Together = Annotated[
    int | None,
    typer.Option(help="Runs at a time in one process. By default 5 for a small net on a GPU, else 1."),
]
Checkpoints = Annotated[list[Path], typer.Argument(help="Checkpoints, each with a state dict of the model.")]


def takes(**tables: Table) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of tables. It gets each table's values as one dict, under the table's name.

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
