"""The tenth round, last part: the offset of the examples whose turn comes next is measured while they are trained on.

In the last epoch of a turn the examples that are held out next are looked at: their loss less the training loss says
how much harder they are. In turns as it is measures that in the first eighth of their turn, when they begin to be
forgotten, and takes a part of the gap for hardness.
"""

from __future__ import annotations

from dataclasses import dataclass

from scaled import WindowRadius
from torch import Tensor

from steppe.auxiliary import turn_of
from steppe.lab.training.batches import Batches
from steppe.methods.gapsam import GapSAM


def is_last(epoch: int) -> bool:
    """Whether a turn ends with this epoch."""
    return turn_of(epoch + 1) > turn_of(epoch)


def kind_in(epoch: int, share: float) -> str:
    """What updates do in an epoch of which this share of the turn is over."""
    if is_last(epoch):
        return "measure"
    return "stay" if epoch < 4 else "grow" if share < 1 / 4 else "move"


class BeforeBatches(Batches):
    """Those whose turn comes next are looked at in the epoch before it."""

    def split(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The rows that are looked at in an epoch, and those that are trained on."""
        looked_at, trained_on = held_in_before(self._whose_turn[None], self.held_out, epoch - 1)
        return looked_at[0].sort().values, trained_on[0].sort().values


@dataclass(frozen=True)
class Before(GapSAM):
    """GapSAM with that offset."""

    def _update(self, step: int) -> str:
        epoch = step // self.epoch_steps + 1
        kind = kind_in(epoch, self._turn(step)[1])
        if kind == "stay":
            return "begin"  # what it measures is dropped when the last epoch of the turn begins
        first = step - (epoch - 1) * self.epoch_steps < self.period
        return "begin" if kind == "measure" and first else kind


def held_in_before(order: Tensor, hold: int, epoch: int) -> tuple[Tensor, Tensor]:
    """For populations: the rows that are looked at in a pass (from 0), and those that are trained on."""
    order = order.roll(-turn_of(epoch + 1) * hold, 1)
    return order[:, hold : 2 * hold] if is_last(epoch + 1) else order[:, :hold], order[:, hold:]


@dataclass(frozen=True)
class BeforeRadius(WindowRadius):
    """The same for populations."""

    def kind(self, step: int) -> str:
        """What an update does."""
        epoch = step // self.pass_steps + 1
        kind = kind_in(epoch, self.place(step)[1])
        if kind == "stay" or (kind == "measure" and step - (epoch - 1) * self.pass_steps < self.period):
            return "begin"
        return "offset" if kind == "measure" else kind
