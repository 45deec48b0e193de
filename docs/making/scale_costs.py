"""What a step costs under FSDP2, in bytes and collectives: counted, and checked by a test on a small model."""

from __future__ import annotations

from dataclasses import dataclass

import steppe
from steppe.method import Method

# All-reduces of one number in a step: norms and inner products over all shards. The test counts them.
NUMBERS: dict[type[Method], int] = {
    steppe.Plain: 0,
    steppe.SAM: 1,
    steppe.ASAM: 1,
    steppe.GSAM: 3,
    steppe.FSAM: 1,
    steppe.GNAM: 6,
    steppe.GAM: 5,
    steppe.MSAM: 1,
}


@dataclass(frozen=True)
class Model:
    """A model under FSDP2: `fully_shard` on each block, then on the whole."""

    entries: int
    blocks: int
    ranks: int
    weight_bytes: int = 4  # of the sharded weights, their gradients and the optimizer's state
    sent_bytes: int = 2  # of gathered weights and of gradients on their way: MixedPrecisionPolicy(bfloat16, bfloat16)
    state: int = 2  # copies of the weights that the base keeps: AdamW's two averages

    @property
    def groups(self) -> int:
        """What is gathered at once: each block, and what is outside of the blocks."""
        return self.blocks + 1

    @property
    def shard(self) -> float:
        """Bytes of one copy of the weights on one rank."""
        return self.entries * self.weight_bytes / self.ranks


@dataclass(frozen=True)
class Cost:
    """What a step of one method costs on each rank."""

    weights: float  # bytes, as all of these
    gradients: float
    state: float
    copies: float  # the copy of the weights, directions, and what the method remembers, at the peak
    gathers: int  # collectives
    scatters: int
    numbers: int
    received: float  # bytes that a rank receives in a step

    @property
    def memory(self) -> float:
        """Bytes of all tensors as long as a rank's shard."""
        return self.weights + self.gradients + self.state + self.copies


def cost(method: Method, model: Model) -> Cost:
    """What a step costs.

    In each look every group is gathered for the forward pass and again for the backward pass, except the outermost,
    which FSDP2 keeps; and the gradients of each group are reduced and scattered once.
    """
    looks = int(method.cost)
    gathers, scatters = looks * (2 * model.groups - 1), looks * model.groups
    others = (model.ranks - 1) / model.ranks * model.entries * model.sent_bytes  # one collective over all groups
    return Cost(
        weights=model.shard,
        gradients=model.shard,
        state=model.state * model.shard,
        copies=method.copies * model.shard,
        gathers=gathers,
        scatters=scatters,
        numbers=NUMBERS[type(method)],
        received=looks * 3 * others,  # two gathers and a scatter, as good as: the outermost group is small
    )


def markdown() -> str:
    """The table for a model of 7 billion weights in 32 blocks on 64 ranks."""
    model, giga = Model(entries=7_000_000_000, blocks=32, ranks=64), 1e9
    lines = [
        "| | looks | weights, gradients, AdamW | copies | together | all-gathers | reduce-scatters | all-reduces of a "
        "number | received |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in NUMBERS:
        method, name = kind(), "the base alone" if kind is steppe.Plain else kind.__name__
        c = cost(method, model)
        own = c.weights + c.gradients + c.state
        lines.append(
            f"| {name} | {int(method.cost)} | {own / giga:.2f} GB | {c.copies / giga:.2f} GB "
            f"| {c.memory / giga:.2f} GB | {c.gathers} | {c.scatters} | {c.numbers} | {c.received / giga:.0f} GB |"
        )
    return "\n".join(lines)
