"""ImageNet-Real, -v2, -R and -C: every accuracy here was counted by hand."""

from __future__ import annotations

import random
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from helpers.photographs import PIECES, Known, World, pieces, write
from steppe.lab.data import load
from steppe.lab.data.imagenet_sets import OF_ALL, OTHER_SETS, ImageNet
from steppe.lab.recipe.recipe import Recipe
from steppe.lab.training.batches import cached_data
from steppe.lab.training.ranks import Ranks
from steppe.lab.training.round_robin import train_round_robin
from steppe.lab.training.run import Run
from steppe.papers import imagenet_evaluation
from steppe.papers.imagenet_evaluation import OtherSets
from steppe.support.errors import UserError

REAL, V2, R, C = (other.metric for other in OTHER_SETS)


def a_run(world: World, table: torch.Tensor | None = None, **recipe) -> Run:
    """A run on that ImageNet whose net has row p of the table as its outputs for piece p, by default class p."""
    made = Run(Recipe(data=f"folder:{world.imagenet}", model="cnn-3", batch=4, epochs=1, **recipe))
    table = torch.eye(PIECES, len(world.names)) if table is None else table
    made.net = Known(table, made.data.mean, made.data.std)
    return made


def measured(world: World, table: torch.Tensor | None = None):
    return OtherSets()(a_run(world, table))


def test_the_net_knows_every_piece(tmp_path):
    """What the other tests rest on."""
    assert a_run(World(tmp_path)).evaluate()["test_accuracy"] == 1.0


# The four sets


def test_real_takes_any_admissible_class_and_leaves_out_images_without_one(tmp_path):
    world = World(tmp_path)
    world.real({0: [], 1: [], 2: [7, 2, 9], 3: [4], 5: [6, 7], 11: [0]})
    # of twelve images two are left out; 3, 5 and 11 are answered wrong
    assert measured(world) == {REAL: {"value": 0.7, "images": 10}}


def test_v2_goes_by_the_number_of_a_folder(tmp_path):
    world = World(tmp_path)
    folder = world.v2({5: 6})
    assert sorted(path.name for path in folder.iterdir())[:4] == ["0", "1", "10", "11"]  # the trap: 2 comes later
    assert measured(world) == {V2: {"value": 11 / 12, "images": 12}}


def test_v2_in_its_edition_with_names(tmp_path):
    world = World(tmp_path)
    folder = world.v2({5: 6})
    for k, name in enumerate(world.names):
        (folder / str(k)).rename(folder / name)
    folder.rename(tmp_path / "imagenet-matched-frequency-format-val")
    assert measured(world) == {V2: {"value": 11 / 12, "images": 12}}


def test_r_is_answered_among_its_own_classes(tmp_path):
    world = World(tmp_path)
    world.r({1: [1, 7], 4: [4, 2], 7: []})  # a folder that is not there does not count
    table = torch.eye(PIECES)
    table[2, 4] = 0.5  # of piece 2: class 2, which the set does not have, and then class 4
    table[7, 4] = 0.5  # of piece 7, in class 1: wrong whatever one may choose from
    found = measured(world, table)
    assert found == {R: {"value": 0.75, "images": 4}, OF_ALL: {"value": 0.5, "images": 4}}


def test_in_batches_of_any_size(tmp_path, monkeypatch):
    world = World(tmp_path)
    world.real({0: [], 4: [3], 10: [1]})
    world.v2({5: 6, 11: 0})
    world.r({1: [1, 7], 4: [4], 9: [9, 0]})
    whole = measured(world)
    assert whole is not None and [whole[m]["value"] for m in (REAL, V2, OF_ALL)] == [9 / 11, 10 / 12, 3 / 5]
    monkeypatch.setattr(imagenet_evaluation, "BATCH", 5)
    assert measured(world) == whole


def test_c_is_the_mean_over_fifteen_corruptions_and_five_severities(tmp_path):
    world = World(tmp_path, 4)
    all_wrong = {0: 1, 1: 2, 2: 3, 3: 0}
    world.c({"fog/1": {0: 1}, "frost/5": all_wrong, "speckle_noise/3": all_wrong, "spatter/1": all_wrong})
    found = measured(world)
    assert found is not None and set(found) == {C}
    assert found[C]["value"] == pytest.approx((73 + 0.75 + 0) / 75, abs=1e-12)
    assert found[C]["images"] == 15 * 5 * 4
    parts = found[C]["corruptions"]
    assert len(parts) == 15 and not {"speckle_noise", "spatter", "saturate", "gaussian_blur"} & set(parts)
    assert parts.pop("fog") == [0.75, 1, 1, 1, 1] and parts.pop("frost") == [1, 1, 1, 1, 0]
    assert all(severities == [1.0] * 5 for severities in parts.values())


def test_images_of_c_are_neither_resized_nor_cut(tmp_path):
    world = World(tmp_path, 4)
    folder = world.c()
    asked = next(OTHER_SETS[3].parts(imagenet_of(world)))
    assert asked.part == "gaussian_noise/1"
    images, targets = asked.images.take(torch.arange(4))
    for row, name in enumerate(world.names):
        with Image.open(next((folder / "gaussian_noise/1" / name).iterdir())) as image:
            assert torch.equal(images[row], torch.from_numpy(np.array(image)).permute(2, 0, 1))
    assert targets.tolist() == [0, 1, 2, 3]


def test_images_are_prepared_as_those_of_the_validation_set(tmp_path):
    world = World(tmp_path, 4)
    for folder in (world.imagenet / "val", world.v2()):
        for k, place in enumerate(sorted(folder.iterdir())):
            for old in place.iterdir():
                old.unlink()
            wide = np.concatenate([pieces()[k], pieces()[k + 4], pieces()[k + 1]], 1)  # its sides are cut off
            Image.fromarray(wide).save(place / f"ILSVRC2012_val_{k + 1:08}.JPEG")
    one, seen = a_run(world), []
    one.net.register_forward_pre_hook(lambda net, inputs: seen.append(inputs[0]))
    OtherSets()(one)
    (own, _), (other,) = next(one.batches.of_test()), seen
    assert own.shape == (4, 3, 224, 224) and torch.equal(own, other)


# What is not there, and what is damaged


def imagenet_of(world: World) -> ImageNet:
    found = ImageNet.of(load(f"folder:{world.imagenet}"))
    assert found is not None
    return found


def test_missing_sets_are_named_in_one_line_and_have_no_entry(tmp_path, capsys):
    world = World(tmp_path, 4)
    world.r({1: [1]})
    found = measured(world)
    assert found is not None and set(found) == {R, OF_ALL}
    shown, missing = capsys.readouterr().err.splitlines()
    assert shown == "Adam, seed 0: ImageNet-R: 100.00 % of 1 images"
    names = "ImageNet-Real (real.json), ImageNet-v2 (imagenetv2-matched-frequency-format-val), ImageNet-C (imagenet-c)"
    assert missing == f"Adam, seed 0: not tested on these sets, which are not in {tmp_path}: {names}"
    assert OtherSets().before(load(f"folder:{world.imagenet}")) in missing
    shutil.rmtree(tmp_path / "imagenet-r")
    assert measured(world) is None
    assert "ImageNet-R (imagenet-r)" in capsys.readouterr().err


def test_data_that_is_not_a_folder_is_reported_as_not_tested(capsys):
    one = Run(Recipe(data="digits", model="mlp-3", model_settings={"hidden": 4}, batch=100, epochs=1))
    assert OtherSets()(one) is None
    said = "Adam, seed 0: not tested on ImageNet's other sets: digits is not a folder of images\n"
    assert capsys.readouterr().err == said


def told(world: World) -> str:
    """The error before a run, which is that at its end too."""
    cached_data.cache_clear()  # files may have been renamed
    data = load(f"folder:{world.imagenet}")
    with pytest.raises(UserError) as error:
        OtherSets().before(data)
    with pytest.raises(UserError) as again:
        measured(world)
    assert str(error.value) == str(again.value) and "\n" not in str(error.value)
    return str(error.value)


def test_a_damaged_real_json(tmp_path):
    world = World(tmp_path, 4)
    path = world.real({})
    whole = path.read_text("utf-8")
    path.write_text(whole[:9], "utf-8")
    assert told(world).startswith(f"{path} is truncated or not JSON: Expecting")
    wanted = "a list, for each image, of its correct classes, from 0 to 3"
    path.write_text('{"a": [1]}', "utf-8")
    assert told(world) == f"{path} must be {wanted}, in one list; it is a dict"
    for wrong, shown in (("[4]", "[4]"), ("3", "3"), ('["n00000001"]', "['n00000001']"), ("[true]", "[True]")):
        path.write_text(f"[[0], {wrong}, [2], []]", "utf-8")
        assert told(world) == f"{path} must have {wanted}; its entry 2 is {shown}"
    path.write_text("[[0], [1], [2]]", "utf-8")
    assert told(world) == f"{path} is about 3 images, but {world.imagenet / 'val'} has 4"
    path.write_text("[[], [], [], []]", "utf-8")
    assert told(world) == f"{path} names no class for any image"
    path.write_text(whole, "utf-8")
    image = world.imagenet / "val" / world.names[0] / "ILSVRC2012_val_00000004.JPEG"
    image.rename(other := image.with_name("cat.JPEG"))
    assert told(world).startswith(f"{other} should be named as in ImageNet, ILSVRC2012_val_00000001.JPEG to 00000004")


def test_classes_that_imagenet_does_not_have(tmp_path):
    world = World(tmp_path, 4)
    folder = world.r({1: [1]})
    write(folder / "n99999999" / "art_0.jpg", 0)
    assert told(world) == f"{folder / 'n99999999'} is a class that train does not have"
    shutil.rmtree(folder)
    folder = world.v2()
    write(folder / "4" / "0.jpeg", 0)
    assert told(world) == f"{folder / '4'} is a class that train does not have"


def test_incomplete_sets(tmp_path):
    world = World(tmp_path, 4)
    folder = world.v2()
    shutil.rmtree(folder / "2")
    assert told(world) == f"{folder} is incomplete: it has no images of class 2, n00000002"
    shutil.rmtree(folder)
    folder = world.c()
    shutil.rmtree(folder / "gaussian_noise/1/n00000003")
    assert told(world) == f"{folder}/gaussian_noise/1 is incomplete: it has no images of class 3, n00000003"
    shutil.rmtree(folder / "snow/4")
    assert told(world) == f"{folder} is incomplete: {folder}/snow/4 is missing"


def test_of_a_thousand_classes_every_image_must_be_there(tmp_path):
    """ImageNet-v2 has ten a class; an edition with twenty went round for a while."""
    names = [f"n{k:08}" for k in range(1000)]
    for k in range(1000):
        (tmp_path / "imagenet-v2" / str(k)).mkdir(parents=True)
        (tmp_path / "imagenet-v2" / str(k) / "a.jpeg").touch()
    imagenet = ImageNet(tmp_path / "imagenet", tuple(names))
    with pytest.raises(UserError, match=r"imagenet-v2 has 1000 images, not 10000: incomplete, or another set$"):
        next(OTHER_SETS[1].parts(imagenet))


def test_where_the_sets_are_looked_for(tmp_path):
    world = World(tmp_path, 4)
    assert imagenet_of(world) == ImageNet(tmp_path / "imagenet", tuple(world.names))
    inside = world.imagenet / "real.json"
    inside.write_text("[]")
    assert OTHER_SETS[0].found(imagenet_of(world)) == inside
    deep = tmp_path / "data" / "ILSVRC" / "Data" / "CLS-LOC"
    assert ImageNet(deep, ()).beside == tmp_path / "data"


# Leaving no trace


def test_modes_buffers_and_random_state_are_restored(tmp_path):
    world = World(tmp_path, 4)
    world.v2()
    world.r({1: [1, 2]})
    one = a_run(world)
    frozen = nn.BatchNorm2d(3).eval()
    one.net = nn.Sequential(nn.BatchNorm2d(3), frozen, nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    one.net.append(nn.Linear(12, 4))
    modes = [module.training for module in one.net.modules()]
    state = {name: tensor.clone() for name, tensor in one.net.state_dict().items()}
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    first = OtherSets()(one)
    assert [module.training for module in one.net.modules()] == modes and not all(modes)
    assert all(torch.equal(tensor, state[name]) for name, tensor in one.net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before[2]
    assert all(p.grad is None for p in one.net.parameters())
    assert OtherSets()(one) == first  # without dropout


@pytest.mark.parametrize(
    ("precision", "taken", "given"),
    [
        ("float32", torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16),
        ("float64", torch.float64, torch.float64),
    ],
)
def test_in_the_precision_of_the_run(tmp_path, precision, taken, given):
    world = World(tmp_path, 4)
    world.v2()
    one, seen = a_run(world, precision=precision), []
    one.net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)).to(taken)
    one.net.register_forward_hook(lambda net, inputs, outputs: seen.append((inputs[0].dtype, outputs.dtype)))
    OtherSets()(one)
    assert seen == [(taken, given)]


@pytest.fixture
def group():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_of_several_processes_the_first_measures(tmp_path, group):
    world = World(tmp_path / "data", 4)
    world.real({1: [2]})
    world.v2({0: 1})
    recipe = Recipe(data=f"folder:{world.imagenet}", model="cnn-3", batch=8, epochs=1)
    first = Run(recipe, ranks=Ranks("ddp", 0, 1), measure=OtherSets())
    assert isinstance(first.model, nn.parallel.DistributedDataParallel)
    train_round_robin([first])
    alone = Run(recipe)
    alone.net.load_state_dict(first.net.state_dict())
    found = OtherSets()(alone)
    assert found is not None and set(found) == {REAL, V2} and first.record["curvature"] == found
    second = Run(recipe, ranks=Ranks("", 1, 2), measure=OtherSets())
    train_round_robin([second])
    assert second.record["status"] == "done" and second.record["curvature"] is None


def test_a_model_that_is_spread_over_processes_is_not_tested(tmp_path):
    world = World(tmp_path, 4)
    world.v2()
    one = a_run(world)
    one.ranks = Ranks("fsdp2", 0, 2)
    assert OtherSets()(one) is None


def test_a_run_resumes_after_a_damaged_set_was_repaired(tmp_path):
    """The training is kept: once the file is repaired, the same command tests the net and ends."""
    world = World(tmp_path / "data", 4)
    path = world.real({})
    whole, out = path.read_text("utf-8"), tmp_path / "out"
    recipe = Recipe(data=f"folder:{world.imagenet}", model="cnn-3", batch=8, epochs=1)

    def train() -> Run:
        one = Run(recipe, out, measure=OtherSets())
        train_round_robin([one])
        return one

    path.write_text("[", "utf-8")
    with pytest.raises(UserError, match="is truncated or not JSON"):
        train()
    saved = torch.load(out / f"{recipe.key}.ckpt", weights_only=True)
    path.write_text(whole, "utf-8")
    one = train()
    record: Any = one.record
    assert record["status"] == "done" and record["epochs"] == saved["record"]["epochs"]
    assert record["curvature"][REAL]["value"] == record["final"]["test_accuracy"]  # each image its class alone
    assert not list(out.glob("*.ckpt"))
