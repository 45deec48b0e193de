"""A `Recipe`: everything that the result of a run depends on. The same recipe gives the same result.

>>> recipe = Recipe(data="digits", model="digits-mlp", method="SAM:rho=0.1", lr=0.1, seed=3)
>>> recipe.method, recipe.key
('sam:rho=0.1', 'digits-digits-mlp-sam-rho-0.1-seed3-...')
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...auxiliary import FEW, how_many_of
from ...averaging import parse as parse_average
from ...method import Method
from ...support.errors import UserError, unknown
from ..data import data_names
from ..data.augmentation import parse as check_augmentation
from .base_names import check_base
from .method_text import bracketed_value, canonical, make_method, pieces_of

TASKS = ("classification", "regression", "multi-label", "language")
PRECISIONS = ("float32", "tf32", "bf16", "fp16", "fp16-fixed", "float64")
HOLDING_OUT = ("held-out", "in-turns")  # the second batch is from data that is not trained on, always or for a while
AUXILIARIES = ("fresh", "fixed", "previous", *HOLDING_OUT)
_NUMBERS = (
    "lr", "momentum", "weight_decay", "mixup", "clip", "share", "label_noise", "hold_out", "label_smoothing", "bias_lr",
)  # fmt: skip
_STEP = re.compile(r"step:([\d.eE+-]+)/([\d.eE+-]+)")
_MULTISTEP = re.compile(r"multistep:([\d.]+)/([\d.]+(?:,[\d.]+)*)")


@dataclass(frozen=True)
class Recipe:
    """One training run.

    The defaults here must never change: a key is made from the fields that differ from them, so that adding a field
    does not change the keys of old records. `suggested` has sensible settings for a data set and a model.
    """

    data: str = "digits"
    model: str = "digits-mlp"
    method: str = "plain"
    base: str = "adam"
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch: int = 100
    epochs: int = 10
    schedule: str = "constant"  # "cosine", "linear" (both to zero), ...: see `lr_at`
    warmup: int = 0  # steps over which the learning rate rises from zero
    augmentation: str = "none"
    mixup: float = 0.0  # alpha of the Beta distribution
    precision: str = "float32"
    compile: bool = False
    clip: float = 0.0  # largest norm of the update direction; 0: no limit
    share: float = 1.0  # share of the training data to use, from its start
    label_noise: float = 0.0  # share of the training labels that are replaced by wrong ones
    hold_out: float = 0.0  # share of the training data to test on instead of the test data, to choose settings
    seed: int = 0
    auxiliary: str = "fresh"  # the second batch, for methods that use two; see `second_batch`
    model_settings: Any = ()  # given as a mapping, stored as sorted pairs
    nesterov: bool = False
    base_settings: Any = ()  # like model_settings
    task: str = "classification"
    loss: str = ""  # the user's own as package.module:function; by default that of the task
    metric: str = ""  # likewise; with ":lower" at the end if a lower value is better
    average: str = ""  # an average of the weights to evaluate too: "ema:0.999", or "swa:0.75" from that share on
    label_smoothing: float = 0.0  # of the training loss only
    bias_lr: float = 1.0  # learning rate of the biases of normalisation layers, relative to lr

    def __post_init__(self) -> None:
        for name in _SETTINGS:
            settings = getattr(self, name)
            pairs = settings.items() if isinstance(settings, Mapping) else settings
            pairs = tuple(sorted((str(k), tuple(v) if isinstance(v, list) else v) for k, v in pairs))
            object.__setattr__(self, name, pairs)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "float" and isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, f.name, float(value))  # 1 and 1.0 are the same recipe
        _check(self)
        object.__setattr__(self, "method", canonical(self.method))

    @property
    def key(self) -> str:
        """A readable file name, unique to the recipe."""
        different = {k: v for k, v in self.as_dict().items() if v != _DEFAULTS[k]}
        digest = hashlib.sha256(json.dumps(different, sort_keys=True).encode()).hexdigest()[:8]
        readable = f"{self.data}-{self.model}-{self.method}"[:80]
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", readable).strip("-.")
        return f"{slug}-seed{self.seed}-{digest}"

    def build_method(self) -> Method:
        """The method object."""
        return make_method(self.method, self.lr)

    def second_batch(self, needs: Set[str], examples: int) -> tuple[str, int]:
        """What the second batch is for a method with these needs, and how many of the examples are held out for it.

        "fresh" for a method whose second batch must not be trained on is "held-out", or "in-turns" below 10 000
        examples.
        """
        if "auxiliary" not in needs:
            return "", 0
        kind, _, count = self.auxiliary.partition(":")
        if kind == "fresh" and "held-out" in needs:
            kind = "held-out" if examples >= FEW else "in-turns"
        if kind not in HOLDING_OUT:
            return kind, 0
        # In turns at least two examples, because BatchNorm refuses a batch of one:
        usual = max(examples // 100, self.batch) if kind == "held-out" else max(round(0.05 * examples), 2)
        try:
            return kind, how_many_of(float(count) if count else usual, examples)
        except ValueError:
            raise UserError(f"auxiliary {self.auxiliary!r}: {examples} training examples are too few for it") from None

    def lr_at(self, step: int, steps_an_epoch: int) -> float:
        """The learning rate of a step: a pure function, so that a checkpoint needs no scheduler state.

        "step:0.25/10" multiplies it by 0.25 every 10 epochs; "multistep:0.2/0.3,0.6" by 0.2 after 30 and 60 % of
        training.
        """
        total = max(self.epochs * steps_an_epoch, 1)
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = min(max((step - self.warmup) / max(total - self.warmup, 1), 0.0), 1.0)
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * done)) / 2
        if self.schedule == "linear":
            return self.lr * (1 - done)
        if self.schedule == "triangle":
            return self.lr * _triangle(done)
        if self.schedule == "onecycle":
            return self.lr * _one_cycle(step - self.warmup, total - self.warmup)
        if found := _STEP.fullmatch(self.schedule):
            return self.lr * float(found[1]) ** (step // (float(found[2]) * steps_an_epoch))
        if found := _MULTISTEP.fullmatch(self.schedule):
            return self.lr * float(found[1]) ** sum(done >= float(share) for share in found[2].split(","))
        return self.lr

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        pairs = {name: getattr(self, name) for name in _SETTINGS}
        plain = {name: {k: list(v) if isinstance(v, tuple) else v for k, v in one} for name, one in pairs.items()}
        return {**asdict(self), **plain}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe with these fields; an unknown field is an error."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown("recipe field", name, known)
        return cls(**values)


_SETTINGS = ("model_settings", "base_settings")
_DEFAULTS = {f.name: f.default if f.name not in _SETTINGS else {} for f in fields(Recipe)}


def _one_cycle(step: int, total: int) -> float:
    """The learning rate of torch's OneCycleLR relative to its maximum: up from 1/25 over 30 %, then down to 4e-6."""
    low, end, top = 1 / 25, 1 / 25 / 1e4, max(0.3 * total - 1, 1e-9)
    rising = step <= top
    share = step / top if rising else min((step - top) / max(total - 1 - top, 1e-9), 1.0)
    start, stop = (low, 1.0) if rising else (1.0, end)
    return stop + (start - stop) * (1 + math.cos(math.pi * share)) / 2


def _triangle(done: float) -> float:
    """The learning rate relative to its maximum: linearly up from 0.2 over 23 %, then linearly down to 0.07."""
    top = 0.23
    return 0.2 + 0.8 * done / top if done < top else 1 - 0.93 * (done - top) / (1 - top)


def filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded recipe with all fields: those that were added after it was recorded have their defaults."""
    return {**_DEFAULTS, **values}


def _check(recipe: Recipe) -> None:
    for name, least in (("batch", 1), ("epochs", 1), ("warmup", 0), ("seed", 0)):
        value = getattr(recipe, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} must be a whole number, at least {least}, not {value!r}")
    for name in _NUMBERS:
        value = getattr(recipe, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise UserError(f"{name} must be a finite number, at least 0, not {value!r}")
    for name, limit in (("momentum", 1), ("hold_out", 1), ("label_smoothing", 1)):
        if getattr(recipe, name) >= limit:
            raise UserError(f"{name} must be less than {limit}, not {getattr(recipe, name):g}")
    if recipe.bias_lr == 0:
        raise UserError("bias_lr must be above 0: it is a factor of the learning rate")
    if not 0 < recipe.share <= 1:
        raise UserError(f"share must be above 0 and at most 1, not {recipe.share:g}")
    if recipe.label_noise > 1:
        raise UserError(f"label_noise must be at most 1, not {recipe.label_noise:g}")
    for name, known in (("precision", PRECISIONS), ("task", TASKS)):
        if getattr(recipe, name) not in known:
            raise unknown(name, str(getattr(recipe, name)), known)
    _check_auxiliary(str(recipe.auxiliary))
    if recipe.average:
        try:
            parse_average(str(recipe.average))
        except ValueError as error:
            raise UserError(str(error)) from None
    check_base(str(recipe.base))
    check_augmentation(recipe.augmentation)
    if recipe.task != "classification" and (recipe.mixup or recipe.label_noise):
        raise UserError(f"mixup and label_noise are for classification, not for {recipe.task}")
    if recipe.label_smoothing and (recipe.task != "classification" or recipe.loss):
        raise UserError("label_smoothing is for the cross-entropy of classification")
    _check_schedule(recipe.schedule)


def _check_schedule(text: str) -> None:
    if text in ("constant", "cosine", "linear", "onecycle", "triangle"):
        return
    try:
        if found := _STEP.fullmatch(text):
            good = float(found[1]) > 0 and float(found[2]) > 0
        else:
            found = _MULTISTEP.fullmatch(text)
            good = found is not None and float(found[1]) > 0 and all(0 < float(x) < 1 for x in found[2].split(","))
    except ValueError:
        good = False
    if not good:
        known = "constant, cosine, linear, onecycle, triangle, step:0.25/10 or multistep:0.2/0.3,0.6,0.8"
        raise UserError(f"no schedule {text!r}: use {known}")


def _check_auxiliary(text: str) -> None:
    kind, colon, count = text.partition(":")
    if kind not in AUXILIARIES:
        raise unknown("auxiliary", text, AUXILIARIES)
    if colon:
        try:
            good = kind in HOLDING_OUT and (0 < float(count) < 1 or (float(count) >= 1 and float(count).is_integer()))
        except ValueError:
            good = False
        if not good:
            raise UserError(
                f"auxiliary {text!r}: only held-out and in-turns take a number, of examples or as a share: held-out:500"
            )


# Defaults for a data set and a model

_MODELS = {
    "digits": "digits-mlp", "mnist": "mlp-3", "fashion-mnist": "mlp-3", "cifar-100": "resnet-18",
    "tiny-imagenet": "resnet-18", "imagenette": "resnet-50", "imagenet": "resnet-50", "text": "gpt-tiny",
}  # fmt: skip
_SMALL = {"base": "adam", "lr": 1e-3, "batch": 100, "epochs": 20}  # as in Generalization Aware Minimization
_LARGE = {
    "base": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "batch": 128, "epochs": 200, "schedule": "cosine",
    "augmentation": "basic",
}  # fmt: skip
_FAST = {
    "base": "sgd", "lr": 1.5, "momentum": 0.85, "nesterov": True, "weight_decay": 8e-4, "bias_lr": 64.0,
    "batch": 1024, "epochs": 16, "schedule": "onecycle", "augmentation": "translate=2+alternating-flip",
    "label_smoothing": 0.2, "precision": "bf16",
}  # fmt: skip
_DIGITS = {"base": "sgd", "lr": 0.1, "momentum": 0.9, "batch": 64, "epochs": 40, "schedule": "cosine"}
_TEXT = {
    "task": "language", "base": "adamw", "lr": 1e-3, "weight_decay": 0.1, "batch": 64, "epochs": 2,
    "schedule": "cosine", "warmup": 200, "clip": 1.0,
}  # fmt: skip
SMALL_MODELS = ("digits-mlp", "mlp-3", "mlp-6", "cnn-3", "cnn-5", "cnn-14")


def suggested_model(data: str) -> str:
    """The default model for a data set; your own data has none."""
    if is_users(data):
        raise UserError(f"name a model for your own data {data!r} with --model")
    return _MODELS.get(data.partition(":")[0], "cnn-5")


def is_users(data: str) -> bool:
    """Whether the name is that of a user's function; names such as cifar-10n:worse are not."""
    return ":" in data and data.partition(":")[0] not in {listing.name for listing in data_names()}


def suggested(data: str, model: str) -> dict[str, Any]:
    """Default settings for a data set and a model: those of a paper, if there are any."""
    if model == "fast-cnn":  # Keller Jordan's, with more epochs in place of test-time augmentation
        return dict(_FAST)
    if data == "digits":
        return dict(_DIGITS)
    if data.partition(":")[0] == "text":
        return dict(_TEXT)
    if data in ("imagenet", "imagenette"):  # images are cropped when they are read
        return {**_LARGE, "epochs": 90, "batch": 256, "weight_decay": 1e-4, "augmentation": "flip"}
    if model in SMALL_MODELS or ":" in model or is_users(data):
        return {**_SMALL, "epochs": 10 if data in ("mnist", "fashion-mnist") else 20}
    return dict(_LARGE)


def read_settings(texts: Iterable[str], what: str) -> dict[str, Any]:
    """Values by name from ``name=value`` pairs, separated by commas or given one by one."""
    found = {}
    for piece in [piece for text in texts for piece in pieces_of(text, ", ")]:
        name, equals, value = piece.partition("=")
        if not equals or not name.isidentifier() or not value:
            raise UserError(f"{what}: {piece!r} is not of the form name=value")
        found[name] = bracketed_value(value)
    return found
