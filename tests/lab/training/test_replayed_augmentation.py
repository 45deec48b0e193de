"""Augmentation recorded as a CUDA graph gives the same batches, bit for bit; on a CPU nothing is recorded."""

from __future__ import annotations

import pytest
import torch

import steppe
from steppe.lab.data import prepare
from steppe.lab.data.augmentation import augment
from steppe.lab.data.dataset import DataSet, Split

POLICIES = ["basic", "basic+cutout", "translate=2+alternating-flip", "randaugment=2/9", "autoaugment"]


def batches(device, policy, replayed, count=6):
    """Several batches of images, each augmented with a seed of its own."""
    images = torch.randint(256, (count * 8, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = Split(images.to(device), torch.zeros(len(images), dtype=torch.long, device=device))
    data = DataSet("random images", split, split, 10, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    generator = torch.Generator(device)

    def changed(inputs):
        return prepare(augment(inputs, policy, generator, data), data)

    function = steppe.Replayed(changed, generators=[generator]) if replayed else changed
    found = []
    for i in range(count):
        generator.manual_seed(100 + i % 4)  # seeds come again
        found.append(function(split.inputs[8 * i : 8 * i + 8]).clone())
        # What is drawn afterwards from the same generator is the same too.
        found.append(torch.rand(3, generator=generator, device=device))
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_replayed_augmentation_gives_the_same_batches(device, policy):
    eager, replayed = (batches(device, policy, on) for on in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
    assert not torch.equal(eager[0], eager[2])
