"""A node that loses worker after worker is set aside; one that is merely unlucky is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chaoskit.coordinator.membership.strikes import Strikes


def struck(strikes: Strikes, *moments_s: float, node: str = "bad") -> list[bool]:
    return [strikes.strike(node, moment_s) for moment_s in moments_s]


def test_the_last_strike_in_the_window_sets_a_node_aside_once() -> None:
    strikes = Strikes(limit=3, window_s=10.0)
    assert struck(strikes, 0.0, 4.0, 8.0, 9.0) == [False, False, True, False]
    assert strikes.trusted(["good", "bad"]) == ["good"]


def test_old_strikes_do_not_count() -> None:
    strikes = Strikes(limit=3, window_s=10.0)
    assert struck(strikes, 0.0, 6.0, 12.0, 20.0) == [False] * 4
    assert strikes.trusted(["good", "bad"]) == ["good", "bad"]
    assert struck(strikes, 21.0) == [True]


def test_a_machine_has_no_part_in_the_strikes_of_the_one_that_had_its_name_before() -> None:
    strikes = Strikes(limit=2, window_s=10.0)
    strikes.note_machine("bad", "host1")
    assert struck(strikes, 0.0, 1.0) == [False, True]
    strikes.note_machine("bad", "host1")
    assert strikes.trusted(["good", "bad"]) == ["good"]
    strikes.note_machine("bad", "host2")
    assert strikes.trusted(["good", "bad"]) == ["good", "bad"]
    assert struck(strikes, 2.0) == [False]
    strikes.set_aside("bad")
    strikes.note_machine("bad", "host3")
    assert struck(strikes, 3.0, 4.0) == [False, True]


def test_each_node_has_strikes_of_its_own() -> None:
    strikes = Strikes(limit=2, window_s=10.0)
    assert not strikes.strike("a", 0.0)
    assert not strikes.strike("b", 0.0)
    assert strikes.strike("a", 1.0)
    assert strikes.trusted(["a", "b"]) == ["b"]


def test_the_last_node_is_never_set_aside() -> None:
    """The failure budget decides then, and gives the reason of the end."""
    strikes = Strikes(limit=1, window_s=10.0)
    struck(strikes, 0.0)
    assert strikes.trusted(["bad"]) == ["bad"]


def test_without_a_limit_nobody_is_set_aside() -> None:
    assert not any(struck(Strikes(limit=0, window_s=10.0), *range(50)))


@given(
    limit=st.integers(1, 6),
    window_s=st.floats(0.1, 50),
    moments_s=st.lists(st.floats(0, 200), max_size=30).map(sorted),
)
def test_a_node_is_set_aside_exactly_when_so_many_strikes_lie_in_one_window(
    limit: int, window_s: float, moments_s: list[float]
) -> None:
    windows = [
        moments_s[end] - moments_s[end - limit + 1] for end in range(limit - 1, len(moments_s))
    ]
    expected = any(width_s <= window_s for width_s in windows)
    assert any(struck(Strikes(limit, window_s), *moments_s)) == expected
