"""The engine of simulated histories. See tests/simulation/engine.py."""

from __future__ import annotations

import pytest
from simulation import engine


def test_a_history_that_goes_in_circles_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless history is not taken for a late one: it would never be over."""
    monkeypatch.setattr(engine, "EVENTS_MAX", 50)
    circling = engine.Engine(0)

    def again() -> None:
        circling.after(0.0, again)

    again()
    with pytest.raises(engine.Endless, match="goes in circles"):
        circling.run(lambda: False, until_s=60.0)
