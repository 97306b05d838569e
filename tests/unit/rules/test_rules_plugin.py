"""The fixture ``rules_fire``: log rules as an assertion in a user's test suite."""

from __future__ import annotations

import pytest

SUITE = """
def test_healthy(rules_fire):
    assert not rules_fire("rules.yaml", "train.log")

def test_hung(rules_fire):
    assert not rules_fire("rules.yaml", "train.log", tail_s=60)
"""


def test_a_suite_can_assert_that_no_rule_fires(pytester: pytest.Pytester) -> None:
    pytester.makefile(
        ".yaml", rules="[{name: a, logPattern: '.*', expectedRecurringFrequencyInSeconds: 5}]"
    )
    pytester.makefile(".log", train="1700000000 loss: 1\n1700000001 loss: 1\n")
    pytester.makepyfile(SUITE)
    result = pytester.runpytest("-p", "no:cacheprovider", "--deselect", "none")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Fired(rule='a', verdict=*hanging*no match for 5 s*"])
