"""Augmentation: each operation against Pillow, each random choice against what it may do."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.image_excerpt import cifar10, images, labels
from steppe.lab.data import augmentation as augmenting
from steppe.lab.data import image_operations as op
from steppe.lab.data import prepare
from steppe.lab.data.augmentation import augment, mixup, parse, policy_names
from steppe.support.errors import UserError

BLACK = torch.zeros(3, 1, 1, dtype=torch.uint8)
AFFINE = Image.Transform.AFFINE


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def by_pillow(x, function):
    done = [np.asarray(function(Image.fromarray(i.permute(1, 2, 0).numpy()))) for i in x]
    return torch.stack([torch.from_numpy(i.copy()).permute(2, 0, 1) for i in done])


def ours(x, operation, strength=0.0, sign=1.0, fill=BLACK):
    count = len(x)
    return op.apply(
        x, torch.full((count,), operation), torch.full((count,), strength), torch.full((count,), sign), fill
    )


EXACT = {
    "equalize": ((op.EQUALIZE,), ImageOps.equalize),
    "invert": ((op.INVERT,), ImageOps.invert),
    "solarize": ((op.SOLARIZE, 100.0), lambda i: ImageOps.solarize(i, 100)),
    "posterize": ((op.POSTERIZE, 4.0), lambda i: ImageOps.posterize(i, 4)),
    "brighter": ((op.BRIGHTNESS, 0.5), lambda i: ImageEnhance.Brightness(i).enhance(1.5)),
    "darker": ((op.BRIGHTNESS, 0.9, -1.0), lambda i: ImageEnhance.Brightness(i).enhance(0.1)),
    "colour up": ((op.COLOR, 0.5), lambda i: ImageEnhance.Color(i).enhance(1.5)),
    "colour down": ((op.COLOR, 0.9, -1.0), lambda i: ImageEnhance.Color(i).enhance(0.1)),
    "contrast up": ((op.CONTRAST, 0.5), lambda i: ImageEnhance.Contrast(i).enhance(1.5)),
    "contrast down": ((op.CONTRAST, 0.9, -1.0), lambda i: ImageEnhance.Contrast(i).enhance(0.1)),
    "sharper": ((op.SHARPNESS, 0.9), lambda i: ImageEnhance.Sharpness(i).enhance(1.9)),
    "softer": ((op.SHARPNESS, 0.9, -1.0), lambda i: ImageEnhance.Sharpness(i).enhance(0.1)),
    "shear x": ((op.SHEAR_X, 0.3), lambda i: i.transform((32, 32), AFFINE, (1, 0.3, 0, 0, 1, 0))),
    "shear y": ((op.SHEAR_Y, 0.3, -1.0), lambda i: i.transform((32, 32), AFFINE, (1, 0, 0, -0.3, 1, 0))),
    "translate x": ((op.TRANSLATE_X, 7.8), lambda i: i.transform((32, 32), AFFINE, (1, 0, 7, 0, 1, 0))),
    "translate y": ((op.TRANSLATE_Y, 7.8, -1.0), lambda i: i.transform((32, 32), AFFINE, (1, 0, 0, 0, 1, -7))),
}


@pytest.mark.parametrize("case", EXACT)
def test_an_operation_gives_what_pillow_gives(case):
    (settings, function), x = EXACT[case], images("cifar10", 64)
    assert torch.equal(ours(x, *settings), by_pillow(x, function))


@pytest.mark.parametrize("degrees", [20.0, -13.5])
def test_rotation_differs_from_pillow_only_where_rounding_decides_between_two_pixels(degrees):
    x = images("cifar10", 64)
    same = ours(x, op.ROTATE, abs(degrees), np.sign(degrees)) == by_pillow(x, lambda i: i.rotate(degrees))
    assert same.float().mean() > 0.998


def test_autocontrast_is_pillows_but_for_its_floating_point_rounding():
    x = images("cifar10", 64)
    difference = ours(x, op.AUTOCONTRAST).int() - by_pillow(x, ImageOps.autocontrast).int()
    assert difference.abs().max() <= 1 and (difference != 0).float().mean() < 0.01


def test_flat_images_survive_what_divides_by_their_range():
    flat = torch.full((1, 3, 8, 8), 77, dtype=torch.uint8)
    assert torch.equal(ours(flat, op.AUTOCONTRAST), flat)
    assert torch.equal(ours(flat, op.EQUALIZE), flat)


def test_identity_and_zero_strength_change_nothing():
    x = images("cifar10", 16)
    assert torch.equal(ours(x, op.IDENTITY), x)
    for operation in (*range(op.SHEAR_X, op.SHARPNESS + 1),):
        assert torch.equal(ours(x, operation, 0.0), x)
    assert torch.equal(ours(x, op.POSTERIZE, 8.0), x)


def test_every_image_gets_its_own_operation():
    x = images("cifar10", 15)
    operation = torch.arange(15)
    table = op.magnitudes(31, 32, 32, x.device)[9]
    together = op.apply(x, operation, table[operation], torch.ones(15), BLACK)
    alone = [ours(x[i : i + 1], i, table[i].item()) for i in range(15)]
    assert torch.equal(together, torch.cat(alone))


def test_moved_images_are_filled_with_the_colour_given():
    colour = torch.tensor([1, 2, 3], dtype=torch.uint8).view(3, 1, 1)
    moved = ours(images("cifar10", 4), op.TRANSLATE_X, 5.0, fill=colour)
    assert torch.equal(moved[..., -5:], colour.expand(4, 3, 32, 5))


def test_magnitudes_at_both_ends():
    table = op.magnitudes(31, 32, 64, torch.device("cpu"))
    assert table.shape == (31, 15)
    assert table[30, op.ROTATE] == 30 and table[0, op.ROTATE] == 0
    assert table[30, op.TRANSLATE_X] == pytest.approx(150 / 331 * 64)
    assert table[30, op.TRANSLATE_Y] == pytest.approx(150 / 331 * 32)
    assert table[[0, 30], op.POSTERIZE].tolist() == [8, 4]
    assert table[[0, 30], op.SOLARIZE].tolist() == [255, 0]


def test_a_crop_is_a_window_of_the_padded_image():
    x = images("cifar10", 24)
    out = augment(x, "crop=4", seeded())
    windows = torch.nn.functional.pad(x, (4,) * 4).unfold(2, 32, 1).unfold(3, 32, 1)  # N, C, 9, 9, 32, 32
    hits = (windows == out[:, :, None, None]).flatten(4).all(4).all(1)  # N, 9, 9
    assert hits.flatten(1).any(1).all()
    assert len(hits.nonzero()[:, 1:].unique(dim=0)) > 10  # not one place for all


def test_a_translation_is_a_window_of_the_reflected_image():
    x = images("cifar10", 64)
    out = augment(x, "translate=2", seeded())
    padded = torch.nn.functional.pad(x.float(), (2,) * 4, mode="reflect").to(torch.uint8)
    windows = padded.unfold(2, 32, 1).unfold(3, 32, 1)  # N, C, 5, 5, 32, 32
    hits = (windows == out[:, :, None, None]).flatten(4).all(4).all(1)  # N, 5, 5
    assert hits.flatten(1).any(1).all()
    assert len(hits.nonzero()[:, 1:].unique(dim=0)) > 15  # of 25 places
    with pytest.raises(UserError, match="translate=32: images of 32x32 are too small"):
        augment(x, "translate=32", seeded())


def test_crops_reach_every_place_alike():
    ramp = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3).repeat(9000, 1, 1, 1)
    middle = augment(ramp, "crop=1", seeded())[:, 0, 1, 1]
    counts = torch.bincount(middle.long(), minlength=10)[1:]
    assert counts.sum() == 9000 and (counts - 1000).abs().max() < 150


def test_a_flip_is_a_mirror_half_the_time():
    x = images("cifar10")
    out = augment(x, "flip", seeded())
    same, mirrored = ((out == y).flatten(1).all(1) for y in (x, x.flip(-1)))
    assert (same ^ mirrored).all() and 60 < mirrored.sum() < 120


def test_basic_is_crop_and_flip():
    x = images("cifar10", 32)
    assert torch.equal(augment(x, "basic", seeded()), augment(x, "crop=4+flip", seeded()))


def test_cutout_is_one_square_of_the_mean_colour():
    data = cifar10()
    x = torch.zeros(200, 3, 32, 32, dtype=torch.uint8)
    out = augment(x, "cutout=16", seeded(), data)
    mean = torch.tensor([round(255 * m) for m in data.mean], dtype=torch.uint8).view(3, 1, 1)
    hole = (out == mean).all(1)
    assert torch.equal(hole, (out != 0).any(1))
    height, width = hole.any(2).sum(1), hole.any(1).sum(1)
    assert torch.equal(hole.sum((1, 2)), height * width)  # a rectangle
    assert height.max() == width.max() == 16 and height.min() >= 8  # half of it may be outside


def test_cutout_in_a_part_of_the_images():
    x = torch.zeros(4000, 1, 8, 8)
    cut = [augment(x, f"cutout=4/{percent}", seeded(), cifar10()).flatten(1).any(1) for percent in (0, 25, 100)]
    assert not cut[0].any() and cut[2].all()
    assert cut[1].double().mean().item() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(augment(x, "cutout=4", seeded(), cifar10()), augment(x, "cutout=4/100", seeded(), cifar10()))


def test_settings_that_are_left_out_have_their_defaults():
    assert parse("randaugment=3") == parse("randaugment=3/9")


def test_cutout_knows_height_from_width():
    hole = augment(torch.zeros(300, 1, 12, 40), "cutout=4", seeded(), cifar10()) > 0
    rows, columns = hole[:, 0].any(2).any(0), hole[:, 0].any(1).any(0)
    assert rows.all() and columns.all()  # centres are drawn over the whole of either side


def test_float_images_stay_floats_and_agree_with_bytes():
    x = images("cifar10", 32)
    policy = "basic+cutout=8+randaugment=3/15+autoaugment"
    of_bytes = augment(x, policy, seeded())
    of_floats = augment(x.float() / 255, policy, seeded())
    assert of_floats.dtype == torch.float32
    assert torch.equal((of_floats * 255).round().to(torch.uint8), of_bytes)


def test_images_on_another_scale_keep_it():
    from steppe.lab.data import load

    digits = load("digits")
    x = digits.train.take(torch.arange(200))[0]
    out = augment(x, "randaugment=2/30", seeded(), digits)
    assert out.dtype == torch.uint8 and out.max() == 16
    assert torch.equal(augmenting.from_bytes(augmenting.to_bytes(x, 16), x, 16), x)


@pytest.mark.parametrize("policy", ["basic", "cutout", "randaugment", "autoaugment", "basic+autoaugment+cutout=8"])
def test_a_seed_fixes_the_result_and_another_changes_it(policy):
    x = images("cifar10", 64)
    first, again, other = (augment(x, policy, seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == x.shape and first.dtype == x.dtype
    assert torch.equal(x, images("cifar10", 64))  # the input is left alone


def test_none_gives_the_batch_itself():
    x = images("cifar10", 2)
    generator = seeded()
    before = generator.get_state()
    assert augment(x, "none", generator) is x
    assert torch.equal(generator.get_state(), before)


def test_randaugment_draws_all_of_its_operations_and_both_signs():
    seen = []
    with mock.patch.object(augmenting, "apply", lambda x, *what: seen.append(what[:3]) or x):
        augment(images("cifar10").repeat(10, 1, 1, 1), "randaugment=2/9", seeded())
    assert len(seen) == 2
    operation, strength, sign = seen[0]
    counts = torch.bincount(operation, minlength=15)
    assert counts[op.INVERT] == 0 and (counts[:14] > 80).all()  # 129 each are expected
    assert torch.equal(strength, op.magnitudes(31, 32, 32, operation.device)[9][operation])
    assert set(sign.tolist()) == {-1.0, 1.0}


def test_autoaugment_applies_the_drawn_policy():
    x = images("cifar10", 32)
    one = torch.tensor([((op.EQUALIZE, 1.0, 0), (op.INVERT, 1.0, 0))])
    with (
        mock.patch.object(augmenting, "AUTOAUGMENT", (None,)),
        mock.patch.object(augmenting, "_policies", return_value=one),
    ):
        out = augment(x, "autoaugment", seeded())
    assert torch.equal(out, by_pillow(x, lambda i: ImageOps.invert(ImageOps.equalize(i))))


def test_autoaugment_keeps_to_its_probabilities():
    seen = []
    x = images("cifar10").repeat(20, 1, 1, 1)
    with mock.patch.object(augmenting, "apply", lambda x, operation, *_: seen.append(operation) or x):
        augment(x, "autoaugment", seeded())
    assert len(op.AUTOAUGMENT) == 25
    for turn, drawn in enumerate(seen):
        share = torch.bincount(drawn, minlength=15) / len(x)
        for operation in range(1, 15):
            expected = sum(p[turn][1] for p in op.AUTOAUGMENT if p[turn][0] == operation) / 25
            assert share[operation].item() == pytest.approx(expected, abs=0.03)


def test_augmentation_does_not_synchronise():
    data, policy = cifar10(), "basic+translate+alternating-flip+cutout+randaugment+autoaugment"
    x, y = images("cifar10", 16), labels("cifar10", 16)
    augment(x, policy, seeded(), data)  # constants are made once, before
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # has shapes but no values: reading one raises
        fake, target = mode.from_tensor(x), mode.from_tensor(y)
        out = augment(fake, policy, seeded(), data)
        mixed, soft = mixup(out, target, 0.2, seeded(), 10)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            out.sum().item()
    assert mixed.shape == x.shape and soft.shape == (16, 10)


@pytest.mark.cuda
def test_augmentation_in_a_captured_graph_equals_eager():
    data = cifar10().to("cuda")
    x, y = next(data.batches("train", 64))
    generator = torch.Generator("cuda")

    def work():
        out = augment(x, "basic+translate+alternating-flip+cutout+randaugment+autoaugment", generator, data)
        return mixup(prepare(out, data), y, 0.2, generator, 10)

    work()  # constants are made once, before
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        generator.manual_seed(3)
        eager = [work() for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        captured = work()
    generator.manual_seed(3)
    for expected in eager:
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_mixup_mixes_images_and_labels_alike():
    x, y = images("cifar10", 64), labels("cifar10", 64)
    mixed, soft = mixup(x, y, 0.4, seeded(3), 10)
    torch.testing.assert_close(soft.sum(1), torch.ones(64))
    # labels of images that are one-hot in 64 classes tell the partner and the share: rebuild the mixture from them
    same, who = mixup(x, torch.arange(64), 0.4, seeded(3), 64)
    torch.testing.assert_close(who.flatten(1) @ x.float().flatten(1), mixed.flatten(1), atol=1e-3, rtol=1e-5)
    assert torch.equal(same, mixed)
    torch.testing.assert_close(who @ torch.nn.functional.one_hot(y, 10).float(), soft)
    assert (who > 0).sum(1).max() == 2 and (who.sum(0) > 0).all()


def test_mixups_share_follows_the_beta_distribution():
    x, y = torch.zeros(20000, 1), torch.arange(20000) % 2
    with mock.patch.object(torch.Tensor, "argsort", return_value=torch.arange(20000).roll(1)):  # partners differ
        share = mixup(x, y, 0.5, seeded(), 2)[1].gather(1, y.unsqueeze(1)).double()
    assert share.mean().item() == pytest.approx(0.5, abs=0.01)
    assert share.var().item() == pytest.approx(1 / (4 * (2 * 0.5 + 1)), abs=0.005)  # Beta(a, a): 1 / (4 (2a + 1))


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("cutuot", "no augmentation 'cutuot': did you mean cutout?"),
        ("basic=3", "augmentation 'basic=3': it takes no settings"),
        ("randaugment=3/9/1", "augmentation 'randaugment=3/9/1': expected whole numbers like randaugment=2/9"),
        ("randaugment=2/40", "augmentation 'randaugment=2/40': expected whole numbers like randaugment=2/9"),
        ("crop=-1", "augmentation 'crop=-1': expected whole numbers like crop=4"),
        ("cutout=big", "augmentation 'cutout=big': expected whole numbers like cutout=16/100"),
        ("cutout=16/101", "augmentation 'cutout=16/101': expected whole numbers like cutout=16/100"),
    ],
)
def test_mistakes_are_reported_in_one_line(policy, said):
    with pytest.raises(UserError) as error:
        parse(policy)
    assert str(error.value) == said


def test_other_mistakes():
    with pytest.raises(UserError, match="needs images, N x C x H x W, not"):
        augment(torch.zeros(4, 64), "basic", seeded())
    with pytest.raises(UserError, match="alpha must be above 0"):
        mixup(images("cifar10", 2), labels("cifar10", 2), 0.0, seeded(), 10)


def test_names_of_augmentation_steps():
    moved = ["crop", "flip", "alternating-flip", "translate", "basic"]
    assert policy_names() == ["none", *moved, "cutout", "randaugment", "autoaugment"]
    assert [len(parse(name)) for name in policy_names()] == [0] + [1] * 8
