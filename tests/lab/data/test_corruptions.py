"""The corruptions: their definitions on cases worked out by hand, and how they behave on real images."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from helpers.image_excerpt import cifar10, images, inputs_of
from steppe.lab.data import CORRUPTIONS, SEVERITIES, all_corrupted, corrupt, corrupted
from steppe.lab.data.image_filters import blur, diamond_square, motion, shuffled, warped, zoomed
from steppe.support.errors import UserError

# Their published constants do not rise in mean squared difference: glass blur trades shuffling for smoothing,
# saturate first takes colour away and then adds it, elastic trades the affine part for the local one, and motion
# blur has one sigma at severities 3 and 4.
UNORDERED = {"glass-blur", "saturate", "elastic", "motion-blur"}


def difference(name, severity, x):
    return (corrupt(x, name, severity).double() - x.double()).square().mean().item()


def test_there_are_17():
    assert len(CORRUPTIONS) == 17 and SEVERITIES == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - UNORDERED))
def test_a_higher_severity_changes_real_images_more(name):
    x = images("cifar10")
    found = [difference(name, severity, x) for severity in SEVERITIES]
    assert found == sorted(found) and found[0] > 0


@pytest.mark.parametrize("name", sorted(UNORDERED))
def test_the_others_change_them_too(name):
    x = images("cifar10", 40)
    assert all(difference(name, severity, x) > 50 for severity in SEVERITIES)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_shape_and_type_stay_and_the_seed_decides(name):
    x = images("cifar10", 12)
    kept = x.clone()
    first, again, other = (corrupt(x, name, 3, seed) for seed in (0, 0, 1))
    assert first.shape == x.shape and first.dtype == torch.uint8 and torch.equal(x, kept)
    assert torch.equal(first, again)
    random = {"noise", "glass", "motion", "fog", "snow", "elastic"}
    assert torch.equal(first, other) == (not random & set(name.split("-")))


@pytest.mark.cuda
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_device_makes_the_same_images_up_to_rounding(name):
    x = images("cifar10", 30)
    difference = corrupt(x.cuda(), name, 4).cpu().int() - corrupt(x, name, 4).int()
    assert (difference.abs() > 1).float().mean() < 1e-3


def test_noise_has_the_published_size():
    grey = torch.full((50, 3, 32, 32), 128, dtype=torch.uint8)
    sigma = {"gaussian-noise": 0.08, "speckle-noise": 0.12 * 128 / 255, "shot-noise": (128 / 255 / 100) ** 0.5}
    for name, expected in sigma.items():
        noise = (corrupt(grey, name, 3).double() - 128) / 255
        assert noise.std().item() == pytest.approx(expected, rel=0.02)
        assert noise.mean().item() == pytest.approx(0, abs=1e-3)
    changed = corrupt(grey, "impulse-noise", 5)
    assert set(changed.unique().tolist()) == {0, 128, 255}
    assert (changed != 128).float().mean().item() == pytest.approx(0.07, abs=0.003)


def test_gaussian_blur_is_scipys():
    x = images("cifar10", 5)
    for sigma in (0.4, 1.0, 2.0):
        expected = ndimage.gaussian_filter(x.double().numpy(), (0, 0, sigma, sigma), mode="nearest", truncate=4)
        torch.testing.assert_close(blur(x.double(), sigma), torch.from_numpy(expected))


def test_blur_with_a_mirror_at_the_border_is_scipys():
    x = images("cifar10", 3).double()
    expected = ndimage.gaussian_filter(x.numpy(), (0, 0, 6.4, 6.4), mode="reflect", truncate=3)
    torch.testing.assert_close(blur(x, 6.4, cut=3, mirror=True), torch.from_numpy(expected))


def test_defocus_of_a_point_is_the_disk():
    point = torch.zeros(1, 3, 9, 9, dtype=torch.uint8)
    point[..., 4, 4] = 255
    out = corrupt(point, "defocus-blur", 4)[0, 0].float()
    assert torch.equal(out, out.T) and torch.equal(out, out.flip(0))
    assert out[4, 4] == out[4, 5] == 51 and out[5, 5] == 0  # radius 1: the pixel and its four neighbours share it


def test_motion_of_a_point_is_half_a_gaussian_in_its_direction():
    point = torch.zeros(2, 1, 33, 33, dtype=torch.float64)
    point[..., 16, 16] = 1
    out = motion(point, 6, 2.0, torch.tensor([0.0, 90.0], dtype=torch.float64))
    weights = torch.exp(-(torch.arange(13).double() ** 2) / 8)
    weights /= weights.sum()
    torch.testing.assert_close(out[0, 0, 16, 4:17].flip(0), weights)  # each pixel looks to the right
    torch.testing.assert_close(out[1, 0, 4:17, 16].flip(0), weights)
    torch.testing.assert_close(out.sum((1, 2, 3)), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.25, 1.2500000000000002, 1.26, 1.75, 2.25])
def test_zoom_is_scipys_of_the_middle(factor):
    x = images("cifar10", 3).double()
    inner = math.ceil(32 / factor)
    top = (32 - inner) // 2
    middle = x[..., top : top + inner, top : top + inner].numpy()
    larger: Any = ndimage.zoom(middle, (1, 1, factor, factor), order=1)
    trim = (larger.shape[-1] - 32) // 2
    expected = torch.from_numpy(larger)[..., trim : trim + 32, trim : trim + 32]
    torch.testing.assert_close(zoomed(x, factor), expected)


@pytest.mark.parametrize(("severity", "count"), [(1, 7), (2, 12), (3, 16), (4, 21), (5, 26)])
def test_zoom_blur_is_the_mean_over_as_many_zooms_as_published(severity, count):
    """The published code takes numpy.arange(1, 1.06, 0.01) and so on, whose ends are included or not by rounding."""
    x = images("cifar10", 4)
    values = x.float() / 255
    zooms = [zoomed(values, float(factor)) for factor in 1 + np.arange(count) * (1.01 - 1)]
    expected = (torch.stack([values, *zooms]).mean(0) * 255).round()
    found = corrupt(x, "zoom-blur", severity).float()
    assert (found != expected).float().mean() < 0.01  # the order of a sum decides halves


def test_glass_only_moves_pixels_and_not_far():
    x = torch.arange(100.0).view(1, 1, 10, 10)
    steps = torch.randint(-1, 1, (2, 1, 10, 10), generator=torch.Generator().manual_seed(0))
    out = shuffled(x, steps, 1)
    assert torch.equal(out.flatten().sort().values, x.flatten()) and not torch.equal(out, x)
    assert torch.equal(shuffled(x, torch.zeros_like(steps), 1), x)
    one = torch.zeros_like(steps)
    one[:, 0, 5, 5] = -1  # only pixel (5, 5) swaps, with (4, 4)
    swapped = shuffled(x, one, 1)[0, 0]
    assert swapped[5, 5] == 44 and swapped[4, 4] == 55 and (swapped != x[0, 0]).sum() == 2


def test_clouds_lie_between_zero_and_one_and_smooth_with_decay():
    def cloud(decay):
        generator = torch.Generator().manual_seed(0)
        return diamond_square(8, 32, decay, lambda *shape: 2 * torch.rand(shape, generator=generator) - 1)

    for decay in (1.75, 3):
        assert torch.equal(cloud(decay).amin((1, 2)), torch.zeros(8))
        assert torch.equal(cloud(decay).amax((1, 2)), torch.ones(8))
    rough, smooth = (cloud(decay).diff(dim=2).abs().mean() for decay in (1.2, 3))
    assert smooth < rough / 2


def test_a_cloud_worked_out_by_hand():
    # All noise is 1. On 2x2: the middle is 1, its sides (2 · 1 + 0) / 4 + 1 = 3/2, the corner stays 0.
    def ones(*shape):
        return torch.ones(shape)

    torch.testing.assert_close(diamond_square(1, 2, 1.0, ones)[0], torch.tensor([[0.0, 1.0], [1.0, 2 / 3]]))
    # On 4x4 these are the corners of the second step, whose noise is 1/decay²: its middles are their mean and that.
    second = diamond_square(1, 4, 3.0, ones)[0][1::2, 1::2]
    torch.testing.assert_close(second, torch.full((2, 2), ((0 + 3 / 2 + 3 / 2 + 1) / 4 + 1 / 9) / (3 / 2)))


def test_contrast_keeps_the_mean_colour():
    x = images("cifar10", 20)
    mean = x.double().mean((2, 3), keepdim=True)
    expected = (mean + 0.4 * (x.double() - mean)).round()
    assert (corrupt(x, "contrast", 3).double() - expected).abs().max() <= 1  # float32 decides halves


def test_brightness_and_saturation_are_those_of_hue_saturation_value():
    import colorsys

    x = images("cifar10", 2)
    pixels = (x[:, :, ::4, ::4].permute(0, 2, 3, 1).reshape(-1, 3) / 255).tolist()
    for name, change in (
        ("brightness", lambda h, s, v: (h, s, min(v + 0.2, 1))),
        ("saturate", lambda h, s, v: (h, min(2 * s + 0.1, 1), v)),
    ):
        expected = [colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*p))) for p in pixels]
        found = corrupt(x, name, 4)[:, :, ::4, ::4].permute(0, 2, 3, 1).reshape(-1, 3)
        assert (found - 255 * torch.tensor(expected)).abs().max() <= 0.51


def test_grey_and_black_pixels_follow_the_same_rule():
    grey = torch.tensor([0, 100], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 3, 4, 2)
    assert corrupt(grey, "brightness", 4)[0, :, 0].tolist() == [[51, 151]] * 3
    assert corrupt(grey, "saturate", 4)[0, :, 0].tolist() == [[0, 100], [0, 90], [0, 90]]


@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_and_pixelate_are_pillows(severity):
    x = images("cifar10", 6)
    quality, share = (80, 65, 58, 50, 40)[severity - 1], (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    for i, pixels in enumerate(x.permute(0, 2, 3, 1).numpy()):
        image, file = Image.fromarray(pixels), io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        jpeg = np.asarray(Image.open(file)).astype(int)
        small = image.resize((int(32 * share), int(32 * share)), Image.Resampling.BOX)
        large = np.asarray(small.resize((32, 32), Image.Resampling.BOX)).astype(int)
        assert np.array_equal(corrupt(x, "jpeg", severity)[i].permute(1, 2, 0).numpy(), jpeg)
        # Pillow rounds between its two passes, we once
        assert np.abs(corrupt(x, "pixelate", severity)[i].permute(1, 2, 0).numpy() - large).max() <= 1


def test_a_corrupted_data_set_changes_only_its_test_images_and_says_so():
    data = cifar10()
    fog = corrupted(data, "fog", 3)
    assert fog.name == "cifar-10-c (regenerated): fog 3"
    assert torch.equal(inputs_of(fog.test), corrupt(inputs_of(data.test), "fog", 3))
    assert torch.equal(fog.test.targets, data.test.targets) and fog.train is data.train

    both = all_corrupted(data, ("contrast", "fog"))
    assert both.name == "cifar-10-c (regenerated): contrast, fog" and len(both.test) == 10 * len(data.test)
    assert torch.equal(inputs_of(both.test)[7 * 80 : 8 * 80], inputs_of(fog.test))
    assert torch.equal(both.test.targets.view(10, -1), data.test.targets.expand(10, -1))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("foq", 1), "no corruption 'foq': did you mean fog?"),
        (("fog", 6), "severity goes from 1 to 5, not 6"),
    ],
)
def test_mistakes(asked, said):
    with pytest.raises(UserError) as error:
        corrupt(images("cifar10", 1), *asked)
    assert str(error.value) == said


def test_grey_images_cannot_be_corrupted():
    with pytest.raises(UserError, match="need colour images as bytes"):
        corrupt(images("mnist", 1), "fog", 1)


@pytest.mark.parametrize("mirror_at_centre", [True, False])
def test_warping_samples_at_the_given_positions(mirror_at_centre):
    x = images("cifar10", 2).double()
    down, across = (
        place.double().expand(2, 32, 32) for place in torch.meshgrid(*[torch.arange(32)] * 2, indexing="ij")
    )
    torch.testing.assert_close(warped(x, down, across, mirror_at_centre), x)
    moved = warped(x, down + 3, across - 2, mirror_at_centre)
    torch.testing.assert_close(moved[..., :29, 2:], x[..., 3:, :30])
    beyond = [30, 29, 28] if mirror_at_centre else [31, 30, 29]  # what rows 32, 33, 34 show
    torch.testing.assert_close(moved[..., 29:, 2:], x[..., beyond, :30])
