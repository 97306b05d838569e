"""The number of children of a load, and what counts as its effect."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.hand.processes.cpu_group import limit_cores
from chaoskit.hand.processes.load import CpuRates, CpuUse, burner_plan, is_effect, rates

S = 10**9  # ns


@given(
    runnable=st.floats(0.1, 16.0),
    limit=st.floats(0.1, 16.0),
    share=st.floats(0.1, 0.9),
)
def test_the_part_that_others_keep_is_that_of_the_fault(
    runnable: float, limit: float, share: float
) -> None:
    plan = burner_plan(runnable, limit, share * limit)
    left = limit * runnable / (runnable + plan.children * plan.duty)
    assert 1 <= plan.children <= 64
    assert 0 < plan.duty <= 1
    if plan.duty < 1:
        assert left == pytest.approx(share * limit)
    else:  # as many as are allowed, or just as many as are needed
        assert left >= share * limit * (1 - 1e-9)
        assert plan.children >= 8 or left == pytest.approx(share * limit)


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [("50000\n", "100000\n", 0.5), ("max", "100000", 0.0), ("-1\n", "100000\n", 0.0)],
)
def test_limits_of_both_kinds_of_cgroups(quota: str, period: str, cores: float) -> None:
    assert limit_cores(quota, period) == cores


@pytest.mark.parametrize(
    ("latest", "counts"),
    [
        (CpuRates(0.2, 0.6), True),
        (CpuRates(0.4, 0.6), False),  # as much CPU time as before
        (CpuRates(0.2, 0.1), False),  # less, as it was not ready to run
        (CpuRates(0.2, 0.14), False),
    ],
)
def test_an_effect_is_less_time_and_longer_waits(latest: CpuRates, *, counts: bool) -> None:
    assert is_effect(CpuRates(0.4, 0.1), latest) is counts
    assert not is_effect(CpuRates(0.0, 0.0), latest._replace(cpu=0.0))


def test_rates_are_of_what_lives_at_both_moments() -> None:
    begin = CpuUse(10.0, {(1, 5): (3 * S, 1 * S), (2, 6): (8 * S, 4 * S)})
    end = CpuUse(12.0, {(1, 5): (4 * S, 4 * S), (2, 9): (5 * S, 9 * S)})
    assert rates(begin, end) == CpuRates(0.5, 1.5)
