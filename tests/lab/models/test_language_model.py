"""The small language model: what it sees, and that all of it is trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from steppe.lab.models import build
from steppe.support.errors import UserError

TEXT = torch.tensor(list(b"Everything must be made as simple as possible, but not one bit simpler."))[None]


def model(**settings):
    torch.manual_seed(0)
    return build("gpt-tiny", (64,), 256, width=16, depth=2, heads=2, **settings).double()


def test_a_token_sees_itself_and_those_before_it_only():
    net, text = model(), TEXT[:, :64]
    other = text.clone()
    other[0, 40] = 7
    with torch.no_grad():
        apart = (net(text) - net(other)).abs().amax(-1)[0]
    assert not apart[:40].any()
    assert (apart[40:] > 0).all()


def test_the_first_tokens_of_a_longer_text_are_read_as_a_short_one():
    net = model()
    with torch.no_grad():
        torch.testing.assert_close(net(TEXT[:, :64])[:, :10], net(TEXT[:, :10]), rtol=1e-12, atol=1e-12)


def test_every_weight_is_trained():
    net = model()
    out = net(TEXT[:, :64])
    assert out.shape == (1, 64, 256)
    F.cross_entropy(out.flatten(0, 1), TEXT[0, 1:65]).backward()
    assert [n for n, p in net.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_images_are_refused():
    with pytest.raises(UserError, match=r"reads rows of tokens, not inputs of shape \(3, 32, 32\)"):
        build("gpt-tiny", (3, 32, 32), 10)
