"""The built-in data sets: their sizes, the names and checksums of their files, and where to download them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from .catalogue_entry import Checksum, Entry, Files, Name
from .dataset import Split
from .download import Source
from .file_formats import read_cifar_binary, read_cifar_pickle, read_idx_pair, read_svhn
from .image_folders import Folders


def _idx(*checksums: str) -> tuple[dict[Name, Checksum], dict[Name, Checksum]]:
    names = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    pairs = list(zip(names, checksums, strict=True))
    return dict(pairs[:2]), dict(pairs[2:])


def _zipped(home: str, folder: str, *checksums: str) -> tuple[Source, ...]:
    names = [*_idx(*checksums)[0], *_idx(*checksums)[1]]
    return tuple(Source(f"{home}/{n}.gz", c, folder) for n, c in zip(names, checksums, strict=True))


def _read_idx(paths: Sequence[Path]) -> Split:
    return read_idx_pair(*paths)


_KRIZ = "https://www.cs.toronto.edu/~kriz"
_HOUSES = "http://ufldl.stanford.edu/housenumbers"
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

_ALL = (
    Entry(
        "mnist",
        "handwritten digits, 28x28 grey",
        60000, 10000, 10, (0.1307,), (0.3081,),
        (
            Files(
                ("MNIST/raw", "MNIST", "mnist"),
                *_idx(
                    "6bbc9ace898e44ae57da46a324031adb",
                    "a25bea736e30d166cdddb491f175f624",
                    "2646ac647ad5339dbf082846283269ea",
                    "27ae3e4e09519cfbb04c329615203637",
                ),
                _read_idx,
            ),
        ),
        _zipped(
            "https://ossci-datasets.s3.amazonaws.com/mnist", "MNIST/raw",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    Entry(
        "fashion-mnist",
        "clothes, 28x28 grey",
        60000, 10000, 10, (0.2860,), (0.3530,),
        (
            Files(
                ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist"),
                *_idx(
                    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                    "9018921c3c673c538a1fc5bad174d6f9",
                    "8181f5470baa50b63fa0f6fddb340f0a",
                    "15d484375f8d13e6eb1aabb0c3f46965",
                ),
                _read_idx,
            ),
        ),
        _zipped(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", "FashionMNIST/raw",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    Entry(
        "cifar-10",
        "objects in 10 classes, 32x32 colour",
        50000, 10000, 10, _CIFAR_MEAN, _CIFAR_STD,
        (
            Files(
                ("cifar-10-batches-bin",),
                {
                    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                },
                {"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
                read_cifar_binary,
            ),
            Files(
                ("cifar-10-batches-py",),
                {
                    "data_batch_1": "c99cafc152244af753f735de768cd75f",
                    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                    "data_batch_4": "634d18415352ddfa80567beed471001a",
                    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                },
                {"test_batch": "40351d587109b95175f43aff81a1287e"},
                read_cifar_pickle,
            ),
        ),
        (Source(f"{_KRIZ}/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
    ),
    Entry(
        "cifar-100",
        "objects in 100 classes, 32x32 colour",
        50000, 10000, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
        (
            Files(
                ("cifar-100-binary",), {"train.bin": ""}, {"test.bin": ""}, partial(read_cifar_binary, label_bytes=2)
            ),
            Files(
                ("cifar-100-python",),
                {"train": "16019d7e3df5f24257cddd939b257f8d"},
                {"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
                partial(read_cifar_pickle, label="fine_labels"),
            ),
        ),
        (Source(f"{_KRIZ}/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
    ),
    Entry(
        "svhn",
        "house numbers, cropped digits, 32x32 colour",
        73257, 26032, 10, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970),
        (
            Files(
                ("SVHN", "svhn", ""),
                {"train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373"},
                {"test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3"},
                lambda paths: read_svhn(paths[0]),
            ),
        ),
        (
            Source(f"{_HOUSES}/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", "SVHN"),
            Source(f"{_HOUSES}/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", "SVHN"),
        ),
    ),
    Entry(
        "tiny-imagenet",
        "objects in 200 classes, 64x64 colour",
        100000, 10000, 200, _IMAGENET_MEAN, _IMAGENET_STD,
        (Folders(("tiny-imagenet-200", "tiny-imagenet"), 64, in_memory=True),),
        (Source("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
    ),
    Entry(
        "imagenette",
        "ten easy classes of ImageNet, cut to 160x160",
        9469, 3925, 10, _IMAGENET_MEAN, _IMAGENET_STD,
        (Folders(("imagenette2-320", "imagenette2", "imagenette2-160", "imagenette"), 160),),
        (
            Source(
                "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz", "3df6f0d01a2c9592104656642f5e78a3"
            ),
        ),
    ),
    Entry(
        "imagenet",
        "objects in 1000 classes, cut to 224x224",
        1281167, 50000, 1000, _IMAGENET_MEAN, _IMAGENET_STD,
        (Folders(("imagenet", "ImageNet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC"), 224),),
        by_hand="an account at image-net.org; put train/CLASS/*.JPEG and val/CLASS/*.JPEG under a folder imagenet",
    ),
)  # fmt: skip

ENTRIES = {entry.name: entry for entry in _ALL}
