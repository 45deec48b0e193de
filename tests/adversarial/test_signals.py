"""Ctrl-C at random moments, with real signals: in steppe, in torch's Python code, in the loop around both."""

from __future__ import annotations

import pytest

from helpers import problems
from helpers.adversarial import chance, trials
from helpers.interrupts import RECOVER, AfterSeconds, Trial, by_closure, by_loop

pytestmark = [
    pytest.mark.slow,
    # A signal that arrives in a destructor or a weak reference's callback cannot be raised there: Python reports it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PLAIN = [m for m in problems.all_variants() if not {"auxiliary", "sample"} & m.needs]
SIGNALS_A_TRIAL = 20


@pytest.mark.parametrize("part", range(4))
def test_a_signal_leaves_a_whole_step_or_none(part):
    fired, wrong = 0, []
    for number in trials(7):
        draw = chance(part, number)
        method, how = draw.choice(PLAIN), draw.choice([by_closure, by_loop])
        if "loss" in method.needs:
            how = by_closure
        recover, home = draw.choice(list(RECOVER)), draw.choice(["device", "cpu"])
        trial = Trial(how, method, RECOVER[recover], home=home)
        for _ in range(SIGNALS_A_TRIAL):
            signal = AfterSeconds(draw.uniform(0, 1.2 * trial.seconds))
            if not trial.right_after(signal):
                wrong.append((number, method, how.__name__, recover, home))
            fired += signal.fired
    print(f"{fired} signals")
    assert wrong == []
    assert fired > 0
