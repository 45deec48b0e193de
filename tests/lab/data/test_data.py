"""Data sets: what they hold, how batches are read, the papers' variants, and mistakes in asking for them."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from helpers.image_excerpt import cifar10, images, inputs_of, labels
from steppe.lab.data import DataSet, Split, corrupt, data_names, data_root, first, load, prepare, with_label_noise
from steppe.lab.data.catalogue import ENTRIES
from steppe.lab.data.file_formats import read_svhn
from steppe.support.errors import UserError


@pytest.fixture(autouse=True)
def _no_data_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))


@pytest.fixture(scope="module")
def digits():
    return load("digits")


# ---- digits


def test_digits_are_all_there_once_as_bytes_up_to_16(digits):
    x, y = load_digits(return_X_y=True)
    mine = torch.cat([inputs_of(digits.train), inputs_of(digits.test)]).flatten(1)
    assert mine.dtype == torch.uint8 and mine.max() == 16
    rows = torch.cat([mine, torch.cat([digits.train.targets, digits.test.targets]).unsqueeze(1)], 1)
    original = torch.cat([torch.from_numpy(x), torch.from_numpy(y).unsqueeze(1)], 1).long()
    assert sorted(rows.tolist()) == sorted(original.tolist())


def test_digits_split_is_fixed_and_stratified(digits):
    again = load("digits")
    assert torch.equal(inputs_of(digits.train), inputs_of(again.train))
    assert torch.equal(digits.test.targets, again.test.targets)
    whole = torch.bincount(torch.from_numpy(load_digits(return_X_y=True)[1]))
    assert ((torch.bincount(digits.test.targets) - whole * 0.2).abs() < 1).all()
    assert (len(digits.train), len(digits.test), digits.classes, digits.input_shape) == (1437, 360, 10, (1, 8, 8))


def test_digits_are_prepared_as_sixteenths(digits):
    x = inputs_of(digits.test)[:5]
    assert torch.equal(prepare(x, digits), x.float() / 16)


# ---- prepare


def test_prepare_scales_and_normalises_per_channel():
    data = cifar10()
    x = inputs_of(data.test)[:6]
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (data.mean, data.std))
    expected = (x.double() / 255 - mean) / std
    torch.testing.assert_close(prepare(x, data, torch.float64), expected)
    torch.testing.assert_close(prepare(x, data), expected.float())


def test_prepare_scales_bytes_only():
    data = cifar10()
    x = inputs_of(data.test)[:6]
    torch.testing.assert_close(prepare(x.float() / 255, data), prepare(x, data))  # floats are taken as from 0 to 1
    plain = DataSet("own", data.train, data.test, 10)
    assert torch.equal(prepare(x.float(), plain), x.float())


def test_preparing_first_in_inference_mode_does_not_spoil_training():
    data = DataSet("own", cifar10().train, cifar10().test, 10, mean=(0.11, 0.12, 0.13), std=(0.5, 0.5, 0.25))
    x = inputs_of(data.test)[:2]
    with torch.inference_mode():
        prepare(x, data)
    leaf = (x.float() / 255).requires_grad_()
    prepare(leaf, data).sum().backward()
    expected = torch.tensor([2.0, 2.0, 4.0]).view(3, 1, 1).expand(2, 3, 32, 32)
    assert leaf.grad is not None and torch.equal(leaf.grad, expected)


# ---- batches


def test_batches_follow_the_order_given():
    data = cifar10()
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    batches = list(data.batches("train", 32, order))
    assert [len(y) for _, y in batches] == [32, 32, 32, 4]
    assert torch.equal(torch.cat([x for x, _ in batches]), inputs_of(data.train)[order])
    assert torch.equal(torch.cat([y for _, y in batches]), data.train.targets[order])


def test_batches_without_an_order_are_as_stored():
    data = cifar10()
    batches = list(data.batches("test", 50))
    assert torch.equal(torch.cat([x for x, _ in batches]), inputs_of(data.test))
    assert [len(y) for _, y in batches] == [50, 30]


def test_moving_to_a_device_keeps_everything():
    data = cifar10().to("meta")
    x, y = next(data.batches("train", 8))
    assert x.device.type == y.device.type == "meta" and x.shape == (8, 3, 32, 32) and x.dtype == torch.uint8
    assert data.input_shape == (3, 32, 32)


def test_a_users_own_split_needs_ten_lines():
    @dataclass(frozen=True)
    class Squares:
        targets: torch.Tensor

        def __len__(self):
            return len(self.targets)

        def take(self, rows, seed=None):
            return rows.float().square().unsqueeze(1), self.targets[rows]

        def to(self, device):
            return self

    data = DataSet("squares", Squares(torch.arange(6) % 2), Squares(torch.arange(4) % 2), 2).to("cpu")
    x, y = list(data.batches("train", 4, torch.arange(5, -1, -1)))[1]
    assert x.tolist() == [[1.0], [0.0]] and y.tolist() == [1, 0] and data.input_shape == (1,)
    assert inputs_of(first(data, 0.5).train).tolist() == [[0.0], [1.0], [4.0]]
    assert with_label_noise(data, 1.0).train.targets.tolist() == [1, 0, 1, 0, 1, 0]


def test_a_splits_parts_must_fit():
    with pytest.raises(UserError, match=r"^3 inputs but 2 targets$"):
        Split(torch.zeros(3, 1), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UserError, match=r"^targets must be one int64 class each, not torch.float32 of shape \(3,\)$"):
        Split(torch.zeros(3, 1), torch.zeros(3))


# ---- the papers' variants


def test_the_first_tenth():
    data = cifar10()
    small = first(data, 0.1)
    assert len(small.train) == 10 and small.name == "cifar-10 first 0.1" and small.test is data.test
    assert torch.equal(inputs_of(small.train), inputs_of(data.train)[:10])
    assert torch.equal(first(data, 1).train.targets, data.train.targets)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.8, 1.0])
def test_label_noise_changes_exactly_that_share_and_never_to_the_same_label(digits, share):
    noisy = with_label_noise(digits, share, seed=3)
    changed = noisy.train.targets != digits.train.targets
    assert changed.sum() == round(share * 1437)
    assert noisy.train.targets.min() >= 0 and noisy.train.targets.max() <= 9
    assert noisy.test is digits.test and torch.equal(inputs_of(noisy.train), inputs_of(digits.train))


def test_label_noise_is_uniform_over_the_other_classes(digits):
    shift = (with_label_noise(digits, 1.0, seed=0).train.targets - digits.train.targets) % 10
    counts = torch.bincount(shift, minlength=10)
    assert counts[0] == 0 and ((counts[1:] - 1437 / 9).abs() < 45).all()  # 160 each, standard deviation 12


def test_label_noise_follows_its_seed(digits):
    one, same, other = (with_label_noise(digits, 0.4, seed).train.targets for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_variants_check_their_numbers(digits):
    for make, said in [
        (lambda: first(digits, 0), "share must be above 0 and at most 1, not 0"),
        (lambda: first(digits, 1e-5), "share 1e-05 of 1437 training examples is none"),
        (lambda: with_label_noise(digits, 1.2), "label noise must be a share from 0 to 1, not 1.2"),
    ]:
        with pytest.raises(UserError) as error:
            make()
        assert str(error.value) == said


# ---- names and places


def test_the_list_of_data_sets(tmp_path):
    listed = {line.name: line for line in data_names()}
    assert list(listed) == [
        *("digits", "mnist", "fashion-mnist", "cifar-10", "cifar-100", "svhn", "tiny-imagenet", "imagenette"),
        *("imagenet", "cifar-10-c", "cifar-10n", "text"),
    ]
    assert [name for name, line in listed.items() if line.found] == ["digits"]
    assert all(line.how and line.about and line.classes > 1 for line in listed.values())
    assert [name for name, line in listed.items() if not (line.train and line.test)] == ["text"]  # the user's own
    address = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    assert listed["cifar-10"].how == f"mkdir -p {tmp_path} && curl -fL {address} | tar xz -C {tmp_path}"
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (tmp_path / "cifar-10-batches-bin" / name).touch()
    assert [line.name for line in data_names(tmp_path) if line.found] == ["digits", "cifar-10", "cifar-10-c"]


def test_every_source_has_a_checksum_and_every_set_as_many_means_as_channels():
    for entry in ENTRIES.values():
        assert all(len(source.md5) == 32 for source in entry.sources) and (entry.sources or entry.by_hand)
        assert len(entry.mean) == len(entry.std) and len(entry.mean) in (1, 3)


def test_the_data_folder(monkeypatch, tmp_path):
    assert data_root("~/here").name == "here" and data_root("~/here").is_absolute()
    assert data_root() == tmp_path
    monkeypatch.delenv("STEPPE_DATA")
    assert data_root().parts[-2:] == (".cache", "steppe")


def test_unknown_and_missing_data(tmp_path):
    for name, said in [
        ("cifar10", "no data set 'cifar10': did you mean cifar-10 or cifar-100?"),
        ("Mnits", "no data set 'mnits': did you mean mnist or digits?"),
        ("folder:/no/such", "folder /no/such does not exist"),
        (
            "imagenet",
            f"imagenet is not in {tmp_path}: name its folder with --data-dir or STEPPE_DATA; to get it you need an "
            "account at image-net.org; put train/CLASS/*.JPEG and val/CLASS/*.JPEG under a folder imagenet",
        ),
    ]:
        with pytest.raises(UserError) as error:
            load(name)
        assert str(error.value) == said
    with pytest.raises(UserError, match=rf"^folder {tmp_path}/none does not exist$"):
        load("mnist", tmp_path / "none")
    with pytest.raises(UserError) as error:
        load("svhn")
    home, folder = "http://ufldl.stanford.edu/housenumbers", f"{tmp_path}/SVHN"
    assert str(error.value) == (
        f"svhn is not in {tmp_path}: name its folder with --data-dir or STEPPE_DATA, or add --download, or run: "
        f"mkdir -p {folder} && cd {folder} && "
        f"curl -fL --remote-name-all {home}/train_32x32.mat {home}/test_32x32.mat"
    )


def test_the_missing_file_of_a_data_set_is_named(tmp_path):
    (tmp_path / "SVHN").mkdir()
    (tmp_path / "SVHN" / "train_32x32.mat").touch()
    (tmp_path / "imagenet" / "val").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"^svhn is incomplete: {tmp_path}/SVHN/test_32x32.mat is missing: name its"):
        load("svhn")
    with pytest.raises(UserError, match=rf"^imagenet is incomplete: {tmp_path}/imagenet/train is missing: name its"):
        load("imagenet")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("sklearn.datasets", "digits needs scikit-learn: pip install scikit-learn ("),
        ("PIL.Image", "jpeg compression needs pillow: pip install pillow ("),
        ("scipy.io", "reading SVHN's files needs scipy: pip install scipy ("),
    ],
)
def test_a_package_that_is_not_installed_is_named(monkeypatch, tmp_path, module, said):
    monkeypatch.setitem(sys.modules, module, None)
    ask = {
        "sklearn.datasets": lambda: load("digits"),
        "PIL.Image": lambda: corrupt(images("cifar10", 1), "jpeg", 1),
        "scipy.io": lambda: read_svhn(tmp_path / "x.mat"),
    }
    with pytest.raises(UserError) as error:
        ask[module]()
    assert str(error.value).startswith(said)


# ---- a user's own


@pytest.fixture
def users(monkeypatch):
    module = types.ModuleType("users_data")
    monkeypatch.setitem(sys.modules, "users_data", module)
    return module


def test_a_users_function_may_return_a_data_set_or_arrays(users):
    users.whole = cifar10
    assert torch.equal(inputs_of(load("users_data:whole").train), inputs_of(cifar10().train))
    x, y = images("mnist").numpy(), labels("mnist").numpy()
    users.arrays = lambda: ((x[:70], y[:70].astype(np.int32)), (x[70:].astype(np.float64) / 255, list(y[70:])))
    data = load("users_data:arrays")
    assert data.classes == 10 and data.name == "users_data:arrays" and data.input_shape == (1, 28, 28)
    assert data.train.targets.dtype == torch.int64 and torch.equal(inputs_of(data.train), images("mnist", 70))
    assert inputs_of(data.test).dtype == torch.float32


def test_a_users_mistakes_are_reported_in_one_line(users):
    def failing():
        raise FileNotFoundError("no\nfile")

    users.number, users.failing, users.thing = lambda: 3, failing, "text"
    users.short = lambda: ((torch.zeros(3, 1), torch.zeros(2)), (torch.zeros(1, 1), torch.zeros(1)))
    users.negative = lambda: ((torch.zeros(1, 1), [-1]), (torch.zeros(1, 1), [0]))
    users.empty = lambda: ((torch.zeros(1, 1), [0]), (torch.zeros(0, 1), torch.zeros(0)))
    users.halves = lambda: DataSet("x", [1], [2], 3)  # type: ignore[arg-type]
    wanted = "must return a DataSet or ((inputs, targets), (inputs, targets)); reading it:"
    for name, said in {
        "number": f"'users_data:number' {wanted} TypeError: cannot unpack non-iterable int object",
        "failing": "'users_data:failing' failed with FileNotFoundError: no file",
        "thing": "'users_data:thing': users_data has no function 'thing'",
        "short": "'users_data:short': 3 inputs but 2 targets",
        "negative": "'users_data:negative': classes count from 0, but there is a target -1",
        "empty": "'users_data:empty' has no test examples",
        "halves": "'users_data:halves': train and test must be Splits, or have len, targets, take and to",
    }.items():
        with pytest.raises(UserError) as error:
            load(f"users_data:{name}")
        assert str(error.value) == f"data set {said}"


def test_a_users_module_that_breaks_on_import(monkeypatch, tmp_path):
    (tmp_path / "breaking_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = "data set 'breaking_module:load': importing breaking_module failed with ZeroDivisionError: division by zero"
    with pytest.raises(UserError) as error:
        load("breaking_module:load")
    assert str(error.value) == said
