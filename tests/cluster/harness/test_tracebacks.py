"""A failed assertion of an outcome shows the line of the test and the message, and no source of chaoskit."""

from __future__ import annotations

import textwrap

import pytest
from unit.report.test_report import failed, outcome, passed

from chaoskit.report.store import write_outcome

_CALLS = {
    "outcome.assert_recovered(within_s=0.001)": "more than 0.001 s",
    "outcome.assert_recovered(within_s=9, lost_steps=-1)": "0 steps were lost, more than -1",
    "outcome.assert_recovered(within_s=9, false_alarms=-1)": "0 false alarms, more than -1",
    "outcome.assert_recovered(within_s=9)": "loss of step 3 is",
    "outcome.assert_same_losses_as_twin()": "loss of step 3 is",
    "calm.assert_recovered(within_s=9)": "the run shows no recovery",
    "print(calm.recovery)": "the run shows no recovery",
}
_TESTS = """
    from pathlib import Path
    import pytest
    from chaoskit.report.store import read_outcomes

    calm, outcome = sorted(read_outcomes(Path(__file__).parent), key=lambda outcome: outcome.name)
"""


@pytest.mark.parametrize("style", ["long", "short"])
def test_the_traceback_of_an_assertion_ends_in_the_test(
    pytester: pytest.Pytester, style: str
) -> None:
    """Each assertion is reported at the line of the test that calls it."""
    changed = passed()
    changed.twin_losses = [*changed.losses[:3], 0.0, *changed.losses[4:]]
    for name, stored in (("a", outcome("a calm run")), ("b", changed)):
        (pytester.path / name).mkdir()
        write_outcome(stored, pytester.path / name)
    tests = [f"def test_{number}():\n    {call}\n" for number, call in enumerate(_CALLS)]
    pytester.makepyfile("\n".join([textwrap.dedent(_TESTS), *tests]))
    shown = pytester.runpytest_inprocess(f"--tb={style}", "-p", "no:cacheprovider")
    shown.assert_outcomes(failed=len(_CALLS))
    text = shown.stdout.str()
    assert "outcome.py" not in text
    for call, message in _CALLS.items():
        assert call in text
        assert message in text


@pytest.mark.costly
def test_the_traceback_of_a_verdict_ends_in_the_test(pytester: pytest.Pytester) -> None:
    """A verdict in a chain of errors, with all tracebacks shown, ends at ``chaos.run``."""
    pytester.makepyfile("""
        from chaoskit import LogPatterns
        from chaoskit.pytest_plugin import VerdictError

        def test_chained(chaos):
            try:
                chaos.run(command=["false"], watch=LogPatterns(step="step ([0-9]+)"), twin=False)
            except VerdictError as verdict:
                raise RuntimeError("the test goes on") from verdict
    """)
    shown = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    text = shown.stdout.str()
    assert "the test goes on" in text
    assert "ended with status 1" in text
    assert "pytest_plugin.py" not in text


def test_the_example_of_a_property_is_shown(pytester: pytest.Pytester) -> None:
    """Hypothesis adds the values for which a test fails to the error, as notes."""
    write_outcome(failed(), pytester.path)
    pytester.makepyfile("""
        from pathlib import Path
        from hypothesis import given, settings, strategies as st
        from chaoskit.errors import BadInput
        from chaoskit.pytest_plugin import VerdictError
        from chaoskit.report.store import read_outcomes

        @settings(database=None, deadline=None)
        @given(st.integers())
        def test_input(nodes):
            if nodes > 3:
                raise BadInput("nodes", nodes, "use less")

        @settings(database=None, deadline=None)
        @given(st.integers())
        def test_verdict(step):
            if step > 6:
                raise VerdictError(read_outcomes(Path(__file__).parent)[0])
    """)
    text = pytester.runpytest_inprocess("-p", "no:cacheprovider").stdout.str()
    assert "bad input: nodes=4: use less" in text
    assert "nodes=4,\n" in text
    assert "loss continuity: step 21 differs" in text
    assert "step=7,\n" in text
