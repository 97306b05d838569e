"""What is promised of time, in numbers of its own: another constant in the runtime moves no bound.

``tests/unit/experiment/test_promised_bounds.py`` holds the settings of the runtime to them. What a bound has from the
run itself is said in ``docs/properties.md``: a hang is measured by the steps and recoveries of that run.
"""

from __future__ import annotations

#: A rank follows a new membership.
FOLLOW_S = 2.0
#: Agents come to a coordinator that begins, or are given up.
REATTACH_S = 2.0
#: A node whose kernel acknowledges what it is sent may be silent.
SLOW_AGENT_S = 1.0
#: Members that are taking over the only state say that they have it.
HEALING_S = 2.0
#: Nodes say which copies they can offer.
RECALL_S = 2.0
#: A world that begins with copies waits for the next worker.
GATHER_S = 0.25
#: A replacement is started after the n-th failure in a row: the first pause, doubled each time, and the longest one.
PAUSE_S, PAUSE_MAX_S = 0.25, 30.0
#: Losses of a node within so long are counted together.
STRIKE_WINDOW_S = 60.0
#: A phase may last ``1 + YOUNG_STEPS / steps`` times the longest one that was seen, over KNOWN_STEPS steps at least;
#: and so many times what a recovery takes longer in the first step of a membership.
YOUNG_STEPS, KNOWN_STEPS, FIRST_STEP_ALLOWANCES = 20, 2, 4.0
