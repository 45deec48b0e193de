"""Recipes, and methods written as text."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

import steppe
from steppe.lab.recipe.method_text import canonical, canonical_of, label_of, make_method, settings_of, split_methods
from steppe.lab.recipe.recipe import Recipe, suggested, suggested_model
from steppe.lab.runner.comparison import plan
from steppe.methods.registry import own_methods as known_methods
from steppe.methods.registry import with_defaults
from steppe.support.errors import UserError

SPLIT = {
    "sam": ["sam"],
    "sam:rho=0.1,gsam,gam:T=3": ["sam:rho=0.1", "gsam", "gam:T=3"],
    "gsam:rho=0.1,alpha=0.3,sam": ["gsam:rho=0.1,alpha=0.3", "sam"],
    "gsam,alpha=0.3": ["gsam:alpha=0.3"],  # a setting belongs to the method before it, with or without the colon
    "gsam alpha=0.3 sam": ["gsam:alpha=0.3", "sam"],
    "sam: rho=0.1, gsam": ["sam:rho=0.1", "gsam"],
    "SAM;Cr-Sam; base": ["sam", "crsam", "plain"],
    "sam,sam:rho=0.05,sam": ["sam"],  # 0.05 is the default: one method
    "gam:T=2,gamma=(0.1,0.01),sam": ["gam:gamma=(0.1,0.01)", "sam"],
    "every:k=10,method=(gsam:rho=0.1,alpha=0.2),sam": ["every:k=10,method=(gsam:rho=0.1,alpha=0.2)", "sam"],
    "every:k=2,method=sam": ["every:k=2,method=(sam)"],
    "gsam:rho=0.1..0.02": ["gsam:rho=0.1..0.02"],
    "sam:normalize=False": ["sam:normalize=false"],
    "": [],
}


@pytest.mark.parametrize("text", SPLIT)
def test_a_list_of_methods(text):
    assert split_methods(text) == SPLIT[text]
    assert split_methods([text]) == SPLIT[text]
    assert [canonical(one) for one in SPLIT[text]] == SPLIT[text]


def test_lists_may_come_in_parts():
    assert split_methods(["sam:rho=0.1,gsam", "gam"]) == ["sam:rho=0.1", "gsam", "gam"]
    assert split_methods(["sam", "rho=0.1"]) == ["sam:rho=0.1"]


def test_texts_make_the_methods_they_describe():
    assert make_method("gsam:rho=.1,alpha=3e-1") == steppe.GSAM(rho=0.1, alpha=0.3)
    assert make_method("gam:T=3,discrepancy=squared,normalize=true") == steppe.GAM(
        T=3, discrepancy="squared", normalize=True
    )
    assert make_method("ssam:total=none,rule=dynamic") == steppe.SSAM(rule="dynamic")
    assert make_method("every:k=10,method=(sam:rho=0.1)") == steppe.Every(10, steppe.SAM(rho=0.1))
    rho = make_method("gsam:rho=0.1..0.02", lr=0.5).at(0, 0.25).rho  # type: ignore[attr-defined]
    assert rho == pytest.approx(0.06, abs=1e-15)
    assert label_of("gsam:alpha=0.3") == "GSAM alpha=0.3"


def test_number_fields_of_an_own_method_in_any_annotation_style():
    @dataclass(frozen=True)
    class Ahead(steppe.Method):
        rho: steppe.Number = 0.1

    try:
        assert make_method("ahead:rho=0.1..0.02", lr=0.5).at(0, 0.5) == Ahead(rho=0.1)
        with pytest.raises(UserError, match="rho must be a number, not 'wide'"):
            make_method("ahead:rho=wide")
    finally:
        del steppe.Method.registry["ahead"]


OWN_MODULE = """
from dataclasses import dataclass
import steppe
from steppe import HERE, Method, Number

@dataclass(frozen=True)
class InnerFirst(Method):
    inner: Method
    times: int = 2
    rho: Number = 0.1
    after: Method | None = None

    def looks(self, ctx):
        return (yield HERE).grad
"""


@pytest.mark.parametrize("postponed", [False, True])
def test_an_own_method_is_used_like_any_other(postponed, tmp_path, monkeypatch):
    """Once it is imported: types of its fields are known whether annotations are postponed or not."""
    name = f"own_methods_{postponed}".lower()
    future = "from __future__ import annotations\n" if postponed else ""
    (tmp_path / f"{name}.py").write_text(future + OWN_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        module = importlib.import_module(name)
        text = "innerfirst:inner=(gsam:alpha=0.3),rho=0.2..0.1,after=(sam)"
        made: Any = make_method(text, lr=0.5)
        assert isinstance(made, module.InnerFirst)
        assert (made.inner, made.after, made.at(0, 0.5).rho) == (steppe.GSAM(alpha=0.3), steppe.SAM(), 0.2)
        assert canonical(text) == text and split_methods(f"sam,{text}") == ["sam", text]
        assert label_of("innerfirst:inner=sam") == "InnerFirst inner=(sam)"
        assert Recipe(method="InnerFirst:inner=sam").build_method() == module.InnerFirst(steppe.SAM())
        with pytest.raises(UserError, match=r"times must be a whole number, not '1\.5'"):
            make_method("innerfirst:inner=sam,times=1.5")
        with pytest.raises(UserError, match=r"InnerFirst needs inner: for example innerfirst:inner=\(sam:rho=0.1\)"):
            make_method("innerfirst")
    finally:
        steppe.Method.registry.pop("innerfirst", None)


def test_every_method_is_restored_from_its_text():
    """Those whose settings are functions keep their defaults."""
    for cls in known_methods():
        for method in [with_defaults(cls), *cls.variants()]:
            functions = [f.name for f in fields(method) if callable(getattr(method, f.name))]
            if any(getattr(method, name) is not getattr(type(method), name, None) for name in functions):
                continue
            assert make_method(canonical_of(method)) == method
            json.dumps(settings_of(method))


def test_the_key_depends_on_the_settings_only():
    recipe = Recipe(method="sam:rho=0.1", lr=0.1, seed=3)
    assert recipe.key == "digits-digits-mlp-sam-rho-0.1-seed3-32274131"  # recorded: keys of old records must stay
    assert Recipe(method="SAM:rho=1e-1", lr=0.1, seed=3, momentum=0).key == recipe.key
    assert Recipe.of(json.loads(json.dumps(recipe.as_dict()))) == recipe
    changed = {f.name: replace(recipe, **{f.name: _other(getattr(recipe, f.name), f.name)}) for f in fields(recipe)}
    keys = {one.key for one in changed.values()}
    assert len(keys) == len(changed) and recipe.key not in keys


def _other(value, name):
    words = {
        "data": "mnist", "model": "mlp-3", "method": "gsam", "base": "sgd", "schedule": "cosine", "precision": "bf16",
        "augmentation": "basic", "auxiliary": "fixed", "model_settings": {"hidden": 5}, "share": 0.5, "hold_out": 0.2,
        "base_settings": {"eps": 1e-6}, "task": "regression", "loss": "mine:loss", "metric": "mine:metric",
        "average": "ema:0.9",
    }  # fmt: skip
    if name in words:
        return words[name]
    shares = ("momentum", "label_noise", "label_smoothing")
    return not value if isinstance(value, bool) else 0.5 if name in shares else value + 1


def test_model_settings_are_kept_as_given():
    recipe = Recipe(model_settings={"widths": [1, 2], "hidden": 5})
    assert recipe.as_dict()["model_settings"] == {"hidden": 5, "widths": [1, 2]}
    assert Recipe.of(recipe.as_dict()) == recipe and hash(recipe) == hash(Recipe.of(recipe.as_dict()))


def test_learning_rates():
    def rates(**settings):
        recipe = Recipe(lr=1.0, epochs=4, **settings)
        return [recipe.lr_at(step, steps_an_epoch=2) for step in range(8)]

    assert rates() == [1.0] * 8
    assert rates(schedule="cosine") == [(1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]
    assert rates(schedule="linear") == [1 - k / 8 for k in range(8)]
    assert rates(schedule="step:0.5/2") == [1.0] * 4 + [0.5] * 4
    assert rates(schedule="step:0.1/1.5")[:6] == [1.0, 1.0, 1.0, 0.1, 0.1, 0.1]
    assert rates(schedule="multistep:0.5/0.25,0.75") == [1.0] * 2 + [0.5] * 4 + [0.25] * 2
    assert rates(schedule="linear", warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_a_plan_pairs_every_method_with_a_base_of_its_cost():
    recipe = Recipe(**suggested("digits", "digits-mlp"))
    jobs = plan(replace(recipe, epochs=10, schedule="step:0.5/4"), ["sam", "gsam", "looksam", "gam:T=3"], [0, 1])
    of_seed = [(job.name, job.role, job.recipe.epochs) for job in jobs if job.recipe.seed == 1]
    assert of_seed == [
        ("SGD", "base", 10),
        ("SGD, 1.1x longer", "equal-cost", 11),
        ("SGD, 2x longer", "equal-cost", 20),
        ("SGD, 4x longer", "equal-cost", 40),  # where longer training hurts, a shorter one is the rival
        ("SGD, 7x longer", "equal-cost", 70),
        ("SAM", "method", 10),
        ("GSAM", "method", 10),
        ("LookSAM", "method", 10),
        ("GAM T=3", "method", 10),
    ]
    assert next(job.recipe.schedule for job in jobs if job.recipe.epochs == 20) == "step:0.5/8"
    assert len(jobs) == 18 and len({job.recipe.key for job in jobs}) == 18


def test_invalid_recipes_are_refused():
    refused: list[dict[str, Any]] = [
        {"batch": 0}, {"epochs": 1.5}, {"lr": math.inf}, {"momentum": 1.0}, {"label_noise": 1.5}, {"hold_out": 1.0},
        {"schedule": "step:x/1"}, {"method": "sam:rho=1e400"},
    ]  # fmt: skip
    for wrong in refused:
        with pytest.raises(UserError):
            Recipe(**wrong)
    with pytest.raises(UserError, match="no recipe field 'learning_rate'"):
        Recipe.of({"learning_rate": 1})


def test_defaults_are_the_papers():
    """Generalization Aware Minimization: Adam 1e-3, batch 100, 10 epochs on MNIST, 20 on CIFAR-10, no augmentation."""
    for data, model, epochs in (("mnist", "mlp-3", 10), ("cifar-10", "cnn-5", 20)):
        assert suggested_model(data) == model
        assert suggested(data, model) == {"base": "adam", "lr": 1e-3, "batch": 100, "epochs": epochs}
    assert suggested_model("cifar-10n:worse") == "cnn-5"
    large = suggested("cifar-100", "resnet-18")
    assert (large["lr"], large["momentum"], large["weight_decay"], large["epochs"]) == (0.1, 0.9, 5e-4, 200)
    with pytest.raises(UserError, match="name a model"):
        suggested_model("mine:load")
