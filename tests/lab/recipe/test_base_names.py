"""Base optimizers by name: torch's, those of other packages, the user's own, Muon with AdamW."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from steppe.lab.recipe.base_names import base_label, check_base, find_base, full_name
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.base_optimizers import make_base
from steppe.support.errors import UserError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))


@pytest.fixture
def mine(monkeypatch):
    """A module of the user's own."""
    module = types.ModuleType("mine_bases")
    monkeypatch.setitem(sys.modules, "mine_bases", module)
    return module


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop", "nadam", "radam", "adamax", "adagrad", "adadelta"])
def test_every_optimizer_of_torch_is_a_base(name):
    base = make_base(Recipe(base=name, lr=0.02, weight_decay=0.01), net().parameters())
    assert type(base).__name__.lower() == name
    assert (base.defaults["lr"], base.defaults["weight_decay"]) == (0.02, 0.01)
    assert base_label(name) == type(base).__name__ and full_name(base_label(name)) == name


def test_settings_of_the_base():
    recipe = Recipe(base="adamw", base_settings={"betas": [0.8, 0.9], "eps": 1e-5})
    base = make_base(recipe, net().parameters())
    assert (base.defaults["betas"], base.defaults["eps"]) == ((0.8, 0.9), 1e-5)
    assert Recipe.of(recipe.as_dict()) == recipe  # a record has lists
    sgd = make_base(Recipe(base="sgd", momentum=0.9, nesterov=True), net().parameters())
    assert sgd.defaults["nesterov"] and sgd.defaults["momentum"] == 0.9
    rms = make_base(Recipe(base="rmsprop", momentum=0.5), net().parameters())
    assert rms.defaults["momentum"] == 0.5


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(base="adamw", base_settings={"beta": 1}), "base adamw: no setting 'beta': did you mean betas"),
        (Recipe(base="adam", momentum=0.9), "base adam takes no momentum"),
        (Recipe(base="adam", nesterov=True), "nesterov is not a setting of base adam"),
        (Recipe(base="sgd", nesterov=True), "Nesterov momentum requires a momentum"),
        (Recipe(base="mine_bases:wrong"), "returned a Linear, not a torch.optim.Optimizer"),
        (Recipe(base="mine_bases:nothing"), "returned no optimizer"),
        (Recipe(base="mine_bases:raises"), "could not be built: KeyError: 'lr'"),
        (Recipe(base="mine_bases:absent"), "has no function 'absent'"),
    ],
)
def test_mistakes_are_reported_in_one_line(mine, recipe, message):
    mine.wrong = lambda params: nn.Linear(1, 1)
    mine.nothing = lambda params: []
    mine.raises = lambda params, lr: {}["lr"]
    with pytest.raises(UserError, match=message):
        make_base(recipe, net().parameters())


def test_an_own_base_gets_the_arguments_that_it_takes(mine):
    mine.of_params = lambda params: torch.optim.SGD(params, lr=0.3)
    mine.with_lr = lambda params, lr, weight_decay=0.07: torch.optim.SGD(params, lr=lr, weight_decay=weight_decay)
    mine.of_model = lambda model, lr: torch.optim.SGD(model[0].parameters(), lr=lr)
    model = net()
    assert make_base(Recipe(base="mine_bases:of_params"), model.parameters()).defaults["lr"] == 0.3
    kept = make_base(Recipe(base="mine_bases:with_lr", lr=0.5), model.parameters())
    assert (kept.defaults["lr"], kept.defaults["weight_decay"]) == (0.5, 0.07)  # its own default
    given = make_base(Recipe(base="mine_bases:with_lr", weight_decay=0.01), model.parameters())
    assert given.defaults["weight_decay"] == 0.01
    of_model = make_base(Recipe(base="mine_bases:of_model"), model.parameters(), model)
    assert len(of_model.param_groups[0]["params"]) == 2


def test_other_packages_bases_are_found_by_their_names(monkeypatch):
    class Lamb(torch.optim.SGD):
        pass

    package = types.ModuleType("timm")
    package.optim = types.ModuleType("timm.optim")  # type: ignore[attr-defined]
    package.optim.Lamb = Lamb  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", package)
    monkeypatch.setitem(sys.modules, "timm.optim", package.optim)
    assert full_name("lamb") == "timm.optim:Lamb" and base_label("timm.optim:Lamb") == "Lamb"
    assert isinstance(make_base(Recipe(base="timm.optim:Lamb", momentum=0.9), net().parameters()), Lamb)
    with pytest.raises(UserError, match="no base 'lam'"):
        Recipe(base=full_name("lam"))


def test_an_unknown_base_names_packages_with_more_bases(monkeypatch):
    there: dict[str, str] = {}
    for name in ("timm", "pytorch_optimizer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", there.get)
    with pytest.raises(UserError, match=r"no base 'lamp'.* \(more bases: pip install timm or pytorch-optimizer\)$"):
        check_base("lamp")
    there |= {"timm": "a spec", "pytorch_optimizer": "another"}
    with pytest.raises(UserError, match=r"no base 'lamp'(?!.*install)"):
        check_base("lamp")


def test_bases_of_pytorch_optimizer():
    package = pytest.importorskip("pytorch_optimizer")
    assert find_base(full_name("lion")) is package.Lion


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon yet")
def test_muon_gets_the_matrices_but_the_last_and_adamw_the_rest():
    model = net()
    muon, adamw = make_base(Recipe(base="muon+adamw", lr=0.01), model.parameters())
    assert [id(p) for p in muon.param_groups[0]["params"]] == [id(model[0].weight), id(model[2].weight)]
    rest = [p for p in model.parameters() if p is not model[0].weight and p is not model[2].weight]
    assert [id(p) for p in adamw.param_groups[0]["params"]] == [id(p) for p in rest]
    assert muon.param_groups[0]["lr"] == adamw.param_groups[0]["lr"] == 0.01


def test_one_cycle_is_torchs():
    recipe = Recipe(lr=0.4, epochs=5, schedule="onecycle")
    base = torch.optim.SGD(net().parameters(), lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(base, max_lr=0.4, total_steps=35, cycle_momentum=False)
    for step in range(35):
        assert recipe.lr_at(step, 7) == pytest.approx(base.param_groups[0]["lr"], rel=1e-12, abs=1e-12), step
        if step < 34:
            base.step()
            theirs.step()
