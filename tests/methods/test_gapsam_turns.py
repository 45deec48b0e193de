"""When GapSAM measures and moves, where examples are held out in turns: on small data, and inside another method."""

from __future__ import annotations

import math
from itertools import groupby

import pytest
import torch
from torch import nn

from helpers.reference_of_gapsam import update
from steppe import SAM, Every, GapSAM, Late, Method, Plain, Random, SharpnessAware
from steppe.auxiliary import turn_of
from steppe.methods.late import for_steps
from steppe.methods.random_steps import chosen

KINDS = ("-", "begin", "measure", "grow", "move")  # by phase; "-": no update


def kinds_of(method: Method, steps: range) -> list[str]:
    """What each of GapSAM's updates in these steps does, as `capture` is told it: by the phase."""
    wrapped = not isinstance(method, GapSAM)
    phases = [method.phase(step) for step in steps]
    own = [phase // 2 for phase in phases if phase is not None and phase % 2] if wrapped else phases
    return [KINDS[phase] for phase in own if phase]


def in_short(kinds: list[str]) -> str:
    """Kinds that follow each other, counted."""
    return " ".join(f"{kind}:{len(list(run))}" for kind, run in groupby(kinds))


# The first update of every turn begins to measure, however few steps an epoch has


def as_it_was(step: int, epoch_steps: int, period: int) -> str:
    """What an update did before the first update of every turn was made to begin it."""

    def place(at: int) -> tuple[int, float]:
        epoch = at / epoch_steps + 1
        return int(epoch).bit_length() - 1, epoch / 2 ** (int(epoch).bit_length() - 1) - 1

    turn, done = place(step)
    if turn < 2 or done < 0.125:
        return "begin" if step == 0 or place(step - period)[0] != turn else "measure"
    return "grow" if done < 0.25 else "move"


def lacks_a_begin(epoch_steps: int, period: int) -> bool:
    """Whether some turn had updates and no begin."""
    updates = range(0, 127 * epoch_steps, period)  # seven turns
    began = {turn_of(s // epoch_steps + 1) for s in updates if as_it_was(s, epoch_steps, period) == "begin"}
    return began != {turn_of(s // epoch_steps + 1) for s in updates}


def test_what_updates_do_is_as_it_was_wherever_each_turn_began():
    lacking = [e for e in range(1, 201) if lacks_a_begin(e, 10)]
    assert lacking == [1, 2, 3, 4, 5, 6, 7, 8, 11, 14, 17]
    for epoch_steps in sorted(set(range(9, 201)) - set(lacking)):
        method, updates = GapSAM(epoch_steps=epoch_steps), range(0, 127 * epoch_steps, 10)
        assert kinds_of(method, updates) == [as_it_was(s, epoch_steps, 10) for s in updates]
    for period in (1, 2, 3, 7):
        for epoch_steps in (e for e in range(1, 60) if not lacks_a_begin(e, period)):
            method, updates = GapSAM(epoch_steps=epoch_steps, period=period), range(0, 127 * epoch_steps, period)
            assert kinds_of(method, updates) == [as_it_was(s, epoch_steps, period) for s in updates]


def test_what_updates_do_with_ten_and_with_21_steps_an_epoch():
    """Typed out. 21: digits in the study of the radius."""
    third_and_fourth = "begin:1 move:3 begin:1 grow:1 move:6 begin:1 measure:1 grow:2 move:12 begin:1"
    assert in_short(kinds_of(GapSAM(epoch_steps=10), range(320))) == "begin:2 measure:1 " + third_and_fourth
    third_and_fourth = "begin:1 grow:1 move:6 begin:1 measure:1 grow:2 move:13"
    short = "begin:1 measure:2 begin:1 measure:3 " + third_and_fourth
    assert in_short(kinds_of(GapSAM(epoch_steps=21), range(320))) == short


@pytest.mark.parametrize(("epoch_steps", "kinds"), [
    # Begins at steps 0, 10, 20, 30, 60, 130 and 260; the turns begin at 0, 4, 12, 28, 60, 124 and 252.
    (4, "begin:4 move:2 begin:1 grow:1 move:5 begin:1 grow:2 move:10 begin:1 measure:2 grow:2"),
    # At 0, 10, 30, 60, 120 and 250; the turns begin at 0, 8, 24, 56, 120 and 248.
    (8, "begin:2 measure:1 begin:1 move:2 begin:1 grow:1 move:4 begin:1 measure:1 grow:2 move:9 begin:1 measure:2 "
        "grow:3"),
])  # fmt: skip
def test_what_updates_do_where_an_epoch_is_shorter_than_the_period(epoch_steps, kinds):
    assert in_short(kinds_of(GapSAM(epoch_steps=epoch_steps), range(310))) == kinds


@pytest.mark.parametrize("period", [1, 3, 10, 25])
def test_the_first_update_of_every_turn_begins_it(period):
    for epoch_steps in range(1, 60):
        method, seen = GapSAM(epoch_steps=epoch_steps, period=period), -1
        for step in range(0, 127 * epoch_steps, period):
            turn = turn_of(step // epoch_steps + 1)
            assert (kinds_of(method, range(step, step + 1)) == ["begin"]) == (turn != seen)
            seen = turn


# Ten updates, at steps 0, 10 … 90, and four steps an epoch. The examples of the third turn are 0.3 harder than others,
# those of the fourth 0.1 easier; apart from that the gap is 0, and 0.05 at step 40.
LOSSES = {0: (1.0, 50.0), 20: (1.0, 1.3), 30: (1.0, 0.9), 40: (1.0, 0.95), 50: (1.0, 0.9)}


def test_an_offset_is_measured_on_the_examples_of_its_own_turn():
    method = GapSAM(least=0.01, ceiling=100.0, epoch_steps=4)
    w, state = nn.Parameter(torch.zeros((), dtype=torch.float64)), {"rho": torch.tensor(0.01, dtype=torch.float64)}
    opt, found = SharpnessAware(torch.optim.SGD([w], lr=0.0), method), []
    for step in range(60):
        here, held = LOSSES.get(step // 10 * 10, (1.0, 1.0))
        opt.step(lambda here=here: w + here, auxiliary=lambda held=held: w + held)
        if step % 10 == 0:
            found.append(float(opt.metrics["rho"]))
            update(method, step, state, *torch.tensor([here, float(state["rho"]), held], dtype=torch.float64))
            assert found[-1] == pytest.approx(float(state["rho"]), rel=1e-9)
    # Target 2 · 0.05, rise 0.01: log 10 is above 2, so ρ grows by e^(0.2 · 2). Then gap and rise are means, weighted
    # with 0.09 and 0.1, of 0.05 and 0 and of 0.01 and 0.0149182: ρ grows by (2 · 0.0236842/0.0125885)^0.2.
    assert found == pytest.approx([0.01] * 4 + [0.014918246976, 0.0194455587], rel=1e-8)


# Inside another method, turns count all steps of training


def kinds_by_hand(runs: list[int], epoch_steps: int, period: int) -> list[str]:
    """What updates do, if GapSAM runs on these steps of training."""
    kinds, last = [], -1
    for step in runs[::period]:
        epoch = step // epoch_steps + 1
        turn = int(math.log2(epoch))
        done = (step - (2**turn - 1) * epoch_steps) / (2**turn * epoch_steps)
        early = "measure" if turn < 2 or done < 0.125 else "grow" if done < 0.25 else "move"
        kinds.append("begin" if turn != last else early)
        last = turn
    return kinds


def test_every_fourth_step_in_turns():
    """Typed out: the fourth turn is that of epochs 8 to 15, steps 70 to 149; an eighth of it is ten steps."""
    method = for_steps(Every(4, GapSAM(period=1)), 400, 10)
    assert in_short(kinds_of(method, range(70, 150))) == "begin:1 measure:1 grow:3 move:15"
    assert in_short(kinds_of(method, range(70))) == "begin:1 measure:2 begin:1 measure:4 begin:1 grow:1 move:8"
    assert kinds_of(method, range(400)) == kinds_by_hand(list(range(0, 400, 4)), 10, 1)


def test_late_in_turns():
    """Typed out: it starts in the middle of the third turn, of steps 30 to 69; the fourth begins at step 70."""
    method = for_steps(Late(GapSAM(period=5), start=0.1), 350, 10)
    assert in_short(kinds_of(method, range(150))) == "begin:1 move:6 begin:1 measure:1 grow:2 move:12"


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("epoch_steps", [1, 4, 10])
def test_turns_inside_any_method_are_those_of_training(epoch_steps, period):
    gap, all_steps = GapSAM(period=period, epoch_steps=epoch_steps), range(400)
    runs = {
        Every(2.5, gap): [s for s in all_steps if s == math.ceil(math.floor(s / 2.5) * 2.5)],
        Every(3, SAM(), between=gap): [s for s in all_steps if s % 3],
        Late(gap, start=33): list(all_steps[33:]),
        Random(gap, p=0.4, seed=1): [s for s in all_steps if chosen(s, 0.4, 1)],
    }
    for method, steps in runs.items():
        between = isinstance(method, Every) and method.between is gap
        phases = [method.phase(step) for step in steps]
        assert all(phase is not None and phase % 2 != between for phase in phases)
        kinds = [KINDS[phase // 2] for phase in phases if phase is not None and phase // 2]
        assert kinds == kinds_by_hand(steps, epoch_steps, period)
    nested = Every(2, Late(gap, start=20), between=Plain())  # GapSAM on every other step from step 40 on
    phases = [phase // 2 for step in all_steps[::2] if (phase := nested.phase(step)) is not None]
    kinds = [KINDS[phase // 2] for phase in phases if phase % 2 and phase // 2]
    assert kinds == kinds_by_hand(list(all_steps[40::2]), epoch_steps, period)


def test_the_radius_inside_every_is_that_of_the_equations():
    """Two steps an epoch, GapSAM on every second one. The third turn begins at step 6, the fourth at step 14."""
    inner = GapSAM(period=1, decay=0.5, least=0.01, ceiling=10.0, epoch_steps=2)
    w, state = nn.Parameter(torch.zeros((), dtype=torch.float64)), {"rho": torch.tensor(0.01, dtype=torch.float64)}
    opt, found = SharpnessAware(torch.optim.SGD([w], lr=0.0), Every(2, inner)), []
    for step in range(26):
        harder = (50.0, 0.2, -0.1, 0.3)[turn_of(step // 2 + 1)]  # at first it guesses: then no ceiling is in the way
        opened = 0.05 if step > 9 and step not in (14, 15) else 0.0
        opt.step(lambda: w + 1.0, auxiliary=lambda held=1.0 + harder + opened: w + held)
        if step % 2 == 0:
            found.append(float(opt.metrics["rho"]))
            losses = torch.tensor([1.0, float(state["rho"]), 1.0 + harder + opened], dtype=torch.float64)
            update(inner, step, state, *losses)
            assert found[-1] == pytest.approx(float(state["rho"]), rel=1e-9)
    # Until step 8 there is no gap; at step 10 its mean is 2/3 · 0.05: ρ grows by (2 · 0.0333333/0.01)^0.2.
    # At step 12 gap and rise are means with the weights 1, 2, 4; 14 begins, and at 16 the gap is 0.05 again.
    by_hand = [*[0.01] * 5, 0.0146144255, *[0.0214321069] * 2, 0.0291643226]
    assert found[:9] == pytest.approx(by_hand, rel=1e-8)
