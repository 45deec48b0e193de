"""The models: their numbers of weights against the literature, their layers' order, their bad inputs."""

from __future__ import annotations

import sys
import types
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.image_excerpt import cifar10, images, labels
from steppe.curvature import Hessian
from steppe.lab.data import prepare
from steppe.lab.models import MODELS, build, model_names
from steppe.lab.models.dense import Appended
from steppe.lab.models.residual import Padded, Residual
from steppe.lab.models.transformer import Attention
from steppe.support.errors import UserError

CIFAR = (3, 32, 32)


def layers_of(name: str, shape: tuple[int, ...] = CIFAR) -> list[nn.Module]:
    model = build(name, shape, 10)
    assert isinstance(model, nn.Sequential)
    return list(model)


# GAM's nets, counted by hand from the paper's description: weights, biases, and scale and shift of the batch norm
# before each weight layer.
MLP_3 = lambda i, h: 2 * i + i * h + h + 2 * h + h * h + h + 2 * h + h * 10 + 10  # noqa: E731


def cnn_weights(channels):
    convolutions = sum(2 * a + 9 * a * b + b for a, b in pairwise(channels))
    return convolutions + 2 * channels[-1] + channels[-1] * 10 + 10


LITERATURE = [
    ("mlp-3", (1, 28, 28), 10, {}, MLP_3(784, 256)),
    ("mlp-3", CIFAR, 10, {}, MLP_3(3072, 1024)),
    ("mlp-3", CIFAR, 10, {"hidden": 50}, MLP_3(3072, 50)),
    ("cnn-3", (1, 28, 28), 10, {}, cnn_weights([1, 32, 64])),
    ("cnn-5", CIFAR, 10, {}, cnn_weights([3, 32, 64, 128, 256])),
    ("cnn-14", CIFAR, 10, {}, cnn_weights([3, 16, *[32] * 4, *[64] * 4, *[128] * 4])),
    ("fast-cnn", CIFAR, 10, {}, 1_971_352),  # Jordan 2024: 1.97M
    ("mlp-6", (1, 28, 28), 10, {}, 785 * 128 + 4 * 129 * 128 + 129 * 10),  # six linear layers, 128 wide
    ("digits-mlp", (1, 8, 8), 10, {}, 65 * 64 + 65 * 10),
    # the usual CIFAR form (3x3 stem, no pooling): 11.17M and 42.51M, as in kuangliu's pytorch-cifar
    ("resnet-18", CIFAR, 10, {}, 11_173_962),
    ("resnet-101", CIFAR, 10, {}, 42_512_970),
    ("resnet-32", CIFAR, 10, {}, 464_154),  # He et al. 2016, table 6: 0.46M
    ("resnet-50", (3, 224, 224), 1000, {}, 25_557_032),  # torchvision's resnet50
    ("wrn-16-8", CIFAR, 10, {}, 10_961_370),  # the same, table 4: 11.0M
    ("wrn-28-2", CIFAR, 10, {}, 1_467_610),  # Zagoruyko and Komodakis; 1.5M
    ("wrn-28-10", CIFAR, 10, {}, 36_479_194),  # the same, table 4: 36.5M
    ("pyramidnet-110", CIFAR, 10, {}, 28_485_477),  # Han et al. 2017: 28.3M; the exact count as in pytorchcv
    ("pyramidnet-110", CIFAR, 10, {"alpha": 48}, 1_772_706),  # Han et al. 2017: 1.7M; the exact count as in pytorchcv
    ("densenet-121", CIFAR, 10, {}, 6_956_298),  # pytorch-cifar: growth 32, 3x3 stem
    ("resnext-29-32x4d", CIFAR, 10, {}, 4_775_754),  # pytorch-cifar has 4,774,218 with a 1x1 stem: 64 x 3 x 8 fewer
    ("vgg-19", CIFAR, 10, {}, 20_040_522),  # pytorch-cifar
    ("vit-small", (3, 224, 224), 1000, {}, 22_050_664),  # timm's vit_small_patch16_224
    ("vit-small", CIFAR, 10, {}, 22_050_664 - 385_000 + 3_850 - 132 * 384 - (768 - 48) * 384),  # patch 4: 65 places
    ("vit-tiny", (3, 224, 224), 1000, {}, 5_717_416),  # timm's vit_tiny_patch16_224
    ("vit-tiny", CIFAR, 10, {}, 5_717_416 - 193_000 + 1_930 - 132 * 192 - (768 - 48) * 192),
    # each block: attention 4 w² + 4 w, two layers 8 w² + 5 w, two norms 4 w; embedding, positions, norm, head
    ("gpt-tiny", (128,), 256, {}, 6 * (12 * 256**2 + 13 * 256) + 256 * 256 + 128 * 256 + 512 + 257 * 256),
]


@pytest.mark.parametrize(("name", "shape", "classes", "settings", "weights"), LITERATURE)
def test_the_number_of_weights_is_that_of_the_literature(name, shape, classes, settings, weights):
    with torch.device("meta"):  # counts without filling memory
        model = build(name, shape, classes, **settings)
    assert sum(p.numel() for p in model.parameters()) == weights


def test_every_model_has_its_number_tested():
    assert set(MODELS) == {name for name, *_ in LITERATURE}


SIZES = {"mlp-6": (1, 28, 28), "cnn-3": (1, 28, 28), "digits-mlp": (1, 8, 8), "resnet-50": (3, 64, 64)}
SIZES |= dict.fromkeys(("resnet-101", "wrn-28-10", "pyramidnet-110"), (3, 16, 16))  # large nets, the same code


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt-tiny"])  # see test_language_model.py
def test_every_weight_and_every_input_matter(name):
    shape = SIZES.get(name, CIFAR)
    x = F.interpolate(images("cifar10", 2).float() / 255, shape[1:])[:, : shape[0]]
    model = build(name, shape, 7)
    x.requires_grad_()
    out = model(x)
    assert out.shape == (2, 7)
    F.cross_entropy(out, torch.tensor([1, 4])).backward()
    assert x.grad is not None and (x.grad != 0).flatten(1).any(1).all()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    # a batch norm subtracts what a bias before it adds: only there may a gradient vanish
    silent += [n for n, p in model.named_parameters() if p.dim() > 1 and p.grad is not None and not p.grad.any()]
    assert silent == []


@pytest.mark.parametrize("name", ["mlp-3", "cnn-3", "cnn-5", "cnn-14"])
def test_gams_nets_have_batch_norm_before_each_weight_layer_and_softplus_after_all_but_the_last(name):
    layers = [m for m in layers_of(name) if not isinstance(m, (nn.Flatten, nn.AdaptiveAvgPool2d))]
    weighted = [i for i, m in enumerate(layers) if isinstance(m, (nn.Linear, nn.Conv2d))]
    assert all(isinstance(layers[i - 1], (nn.BatchNorm1d, nn.BatchNorm2d)) for i in weighted)
    assert all(isinstance(layers[i + 1], nn.Softplus) for i in weighted[:-1])
    assert len(layers) == 3 * len(weighted) - 1 and weighted[-1] == len(layers) - 1
    assert len(weighted) == {"mlp-3": 3, "cnn-3": 3, "cnn-5": 5, "cnn-14": 14}[name]


def test_cnn_14_halves_the_image_in_its_sixth_and_tenth_convolution():
    convolutions = [m for m in layers_of("cnn-14") if isinstance(m, nn.Conv2d)]
    assert [i for i, m in enumerate(convolutions, 1) if m.stride == (2, 2)] == [6, 10]


def test_the_six_layer_net_is_linear_and_relu_in_turn():
    layers = layers_of("mlp-6", (1, 28, 28))[1:]
    assert [type(m) for m in layers] == [nn.Linear, nn.ReLU] * 5 + [nn.Linear]


def test_softplus_instead_of_relu():
    model = build("resnet-50", (3, 64, 64), 10, activation="softplus")
    assert sum(isinstance(m, nn.Softplus) for m in model.modules()) == 1 + 16 * 3
    assert not any(isinstance(m, nn.ReLU) for m in model.modules())


def sides_after_convolutions(name):
    model = build(name, CIFAR, 10)
    sides = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, x, y: sides.append(y.shape[-1]))
    with torch.no_grad():
        model.eval()(torch.zeros(1, *CIFAR))
    return sides


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("resnet-18", {32: 5, 16: 5, 8: 5, 4: 5}),  # 17 convolutions and 3 projections
        ("resnet-32", {32: 11, 16: 10, 8: 10}),  # 31 convolutions, no projections
        ("wrn-28-2", {32: 10, 16: 9, 8: 9}),  # 25 convolutions and 3 projections
        ("pyramidnet-110", {32: 37, 16: 36, 8: 36}),  # 109 convolutions, no projections
        ("resnext-29-32x4d", {32: 12, 16: 10, 8: 9}),  # 28 and 3 projections; the first 1x1 of a stage is large
        ("densenet-121", {32: 14, 16: 25, 8: 49, 4: 32}),  # 120 convolutions
        ("vgg-19", {32: 2, 16: 2, 8: 4, 4: 4, 2: 4}),  # 16 convolutions
        ("resnet-50", {16: 1, 8: 11, 4: 13, 2: 19, 1: 9}),  # 49 and 4 projections
    ],
)
def test_depth_and_where_the_image_shrinks(name, sides):
    found = sides_after_convolutions(name)
    assert {side: found.count(side) for side in dict.fromkeys(found)} == sides


CONV, NORM, RELU = nn.Conv2d, nn.BatchNorm2d, nn.ReLU


@pytest.mark.parametrize(
    ("name", "body", "after"),
    [
        ("resnet-18", [CONV, NORM, RELU, CONV, NORM], RELU),
        ("resnet-32", [CONV, NORM, RELU, CONV, NORM], RELU),
        ("resnet-101", [CONV, NORM, RELU, CONV, NORM, RELU, CONV, NORM], RELU),
        ("resnext-29-32x4d", [CONV, NORM, RELU, CONV, NORM, RELU, CONV, NORM], RELU),
        ("wrn-28-10", [NORM, RELU, CONV, NORM, RELU, CONV], nn.Identity),
        ("pyramidnet-110", [NORM, CONV, NORM, RELU, CONV, NORM], nn.Identity),
        ("densenet-121", [NORM, RELU, CONV, NORM, RELU, CONV], None),
    ],
)
def test_the_order_inside_a_block(name, body, after):
    with torch.device("meta"):
        blocks = [m for m in layers_of(name) if isinstance(m, (Residual, Appended))]
    changing = [b for b in blocks if name.startswith("wrn") and isinstance(b.shortcut, CONV)]
    assert len(changing) == (3 if name.startswith("wrn") else 0)  # those share their first norm with the shortcut
    assert all([type(m) for m in b.body] == body[2:] for b in changing)
    others = [b for b in blocks if b not in changing]
    assert others and all([type(m) for m in b.body] == body for b in others)
    assert after is None or all(type(b.after) is after for b in blocks)


@pytest.mark.parametrize(
    ("name", "stem", "last"),
    [
        ("resnet-18", [CONV, NORM, RELU], []),
        ("resnet-32", [CONV, NORM, RELU], []),
        ("resnet-50", [CONV, NORM, RELU, nn.MaxPool2d], []),
        ("wrn-28-2", [CONV, NORM, RELU], [NORM, RELU]),  # the first block shares its norm with its shortcut
        ("pyramidnet-110", [CONV, NORM], [NORM, RELU]),
        ("densenet-121", [CONV], [NORM, RELU]),
    ],
)
def test_what_comes_before_and_after_the_blocks(name, stem, last):
    with torch.device("meta"):
        layers = layers_of(name)
    blocks = [i for i, m in enumerate(layers) if isinstance(m, (Residual, Appended))]
    assert [type(m) for m in layers[: blocks[0]]] == stem
    assert [type(m) for m in layers[blocks[-1] + 1 :]] == [*last, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear]


def test_vgg_is_convolution_norm_relu_in_turn_with_five_poolings():
    with torch.device("meta"):
        layers = [type(m) for m in layers_of("vgg-19")][:-3]
    assert layers == [m for count in (2, 2, 4, 4, 4) for m in [CONV, NORM, RELU] * count + [nn.MaxPool2d]]


def test_which_shortcuts_have_weights():
    with torch.device("meta"):
        made = {name: layers_of(name) for name in ("resnet-18", "resnet-32", "pyramidnet-110")}
    kinds = {name: [m.shortcut for m in model if isinstance(m, Residual)] for name, model in made.items()}
    assert [type(s) for s in kinds["resnet-18"]].count(nn.Sequential) == 3
    padded = [s for s in kinds["resnet-32"] if isinstance(s, Padded)]
    assert len(padded) == 2 and not any(s.mean for s in padded)  # He et al.: every second pixel
    assert all(isinstance(s, Padded) and s.mean for s in kinds["pyramidnet-110"])  # Han et al.: means of 2x2


def test_a_padded_shortcut_adds_zeros():
    x = images("cifar10", 2).float()
    out = Padded(3, 5, stride=2)(x)
    assert torch.equal(out[:, :3], x[..., ::2, ::2]) and not out[:, 3:].any() and out.shape == (2, 5, 16, 16)
    torch.testing.assert_close(Padded(3, 5, stride=2, mean=True)(x)[:, :3], F.avg_pool2d(x, 2))
    assert torch.equal(Padded(3, 3, stride=1)(x), x)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_softmax_of_scaled_scores_times_the_values(causal):
    torch.manual_seed(0)
    own = Attention(12, 3, causal).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    heads = [part.unflatten(-1, (3, 4)).transpose(1, 2) for part in own.inwards(x).chunk(3, -1)]
    scores = torch.einsum("nhtd,nhsd->nhts", *heads[:2]) / 2  # the root of 4, the width of a head
    if causal:
        scores = scores.masked_fill(torch.arange(5)[:, None] < torch.arange(5), -torch.inf)
    seen = torch.einsum("nhts,nhsd->nthd", scores.exp() / scores.exp().sum(-1, keepdim=True), heads[2])
    torch.testing.assert_close(own(x), own.outwards(seen.flatten(2)), rtol=1e-12, atol=1e-12)


def test_the_curvature_of_the_transformer_is_that_of_its_gradients():
    """Fused attention has no second derivative; the Hessian selects the kernel that has one."""
    model = build("vit-tiny", (3, 8, 8), 10).double()
    batch = images("cifar10", 2)[..., :8, :8].double() / 255, torch.tensor([1, 2])
    H = Hessian(model, F.cross_entropy, batch)
    direction = [torch.randn_like(p) for p in model.parameters()]
    gradients = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), direction, alpha=step)
        gradients.append(torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), list(model.parameters())))
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), direction, alpha=1e-6)
    expected = torch.cat([((a - b) / 2e-6).flatten() for a, b in zip(*gradients, strict=True)])
    product = H @ torch.cat([d.flatten() for d in direction])
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


def test_the_random_state_fixes_a_model():
    first, again, other = (torch.manual_seed(s) and build("resnet-32", CIFAR, 10) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.get_parameter("0.weight"), other.get_parameter("0.weight"))


def test_a_batch_goes_from_the_data_set_into_the_model():
    data = cifar10()
    x, _ = next(data.batches("train", 4))
    out = build("cnn-5", data.input_shape, data.classes)(prepare(x, data))
    assert out.shape == (4, 10)


def test_every_model_has_a_line_about_it():
    listed = dict(model_names())
    assert list(listed) == list(MODELS) and all(len(line) > 20 and line.endswith(".") for line in listed.values())


@pytest.fixture
def users(monkeypatch):
    module = types.ModuleType("users_net")
    monkeypatch.setitem(sys.modules, "users_net", module)
    return module


def test_a_users_model_with_and_without_arguments(users):
    users.fixed = lambda: nn.Linear(2, 2)
    users.fitting = lambda input_shape, classes, width=3: nn.Linear(input_shape[0], classes * width)
    assert build("users_net:fixed", (5,), 4).out_features == 2
    assert build("users_net:fitting", (5,), 4).out_features == 12
    assert build("users_net:fitting", (5,), 4, width=2).out_features == 8


def test_a_users_mistakes_are_reported_in_one_line(users):
    def failing():
        raise RuntimeError("no\nweights")

    users.wrong, users.failing, users.number = lambda: 3, failing, 7
    for name, said in {
        "users_net:wrong": "model 'users_net:wrong' returned a int, not a torch.nn.Module",
        "users_net:failing": "model 'users_net:failing' for inputs (5,) could not be built: RuntimeError: no weights",
        "users_net:number": "model 'users_net:number': users_net has no function 'number'",
        "no_such_module:build": "model 'no_such_module:build': cannot import no_such_module "
        "(No module named 'no_such_module')",
    }.items():
        with pytest.raises(UserError) as error:
            build(name, (5,), 4)
        assert str(error.value) == said


def test_wrong_model_names_and_settings_are_reported_in_one_line():
    for name, settings, said in [
        ("resnet18", {}, "no model 'resnet18': did you mean resnet-18 or resnet-101?"),
        ("resnet-18", {"activation": "rlu"}, "no activation 'rlu': did you mean relu?"),
        ("vit-small", {"patch": 5}, "images of 32x32 cannot be cut into patches of 5x5"),
    ]:
        with pytest.raises(UserError) as error:
            build(name, CIFAR, 10, **settings)
        assert str(error.value) == said
    with pytest.raises(
        UserError, match=r"^model 'cnn-5' for inputs \(3, 32, 32\) could not be built: TypeError: .*width"
    ):
        build("cnn-5", CIFAR, 10, width=3)


def test_timm_models_are_built_by_timm(monkeypatch):
    timm = types.ModuleType("timm")
    timm.is_model = lambda name: name == "resnet50"  # type: ignore[attr-defined]
    timm.list_models = lambda: ["resnet50"]  # type: ignore[attr-defined]
    timm.create_model = lambda name, **settings: nn.Linear(settings["in_chans"], settings["num_classes"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    model = build("timm:resnet50", CIFAR, 10)
    assert (model.in_features, model.out_features) == (3, 10)
    with pytest.raises(UserError, match=r"no timm model 'resnet5': did you mean resnet50\?"):
        build("timm:resnet5", CIFAR, 10)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match="model 'timm:resnet50' needs timm"):
        build("timm:resnet50", CIFAR, 10)


def test_labels_of_the_excerpt_are_cifars():
    assert labels("cifar10", 4).tolist() == [3, 8, 8, 0]  # cat, ship, ship, airplane
