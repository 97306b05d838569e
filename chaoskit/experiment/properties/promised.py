"""Time bounds of the properties, as numbers of their own, so that a changed constant in the runtime
moves no bound.

``tests/unit/experiment/test_promised_bounds.py`` compares the settings of the runtime with them. A
bound may also depend on the run, as ``docs/properties.md`` says: the limit of a hang follows from
its steps and recoveries.

-> experiment/properties/base.py (hang_limit_s): that limit. coordinator/membership/limits.py: the
runtime's own numbers.
"""

from __future__ import annotations

#: Time in which a rank follows a new membership.
FOLLOW_S = 2.0
#: Time in which agents connect to a new coordinator; later they are given up.
REATTACH_S = 2.0
#: Longest silence of a node with a kernel that acknowledges messages.
SLOW_AGENT_S = 1.0
#: Time in which members that take over the only state report that they have it.
HEALING_S = 2.0
#: Time in which nodes report the copies that they can offer.
RECALL_S = 2.0
#: Longest wait of a world that begins with copies for the next worker.
GATHER_S = 0.25
#: Pause before a replacement after a failure: the first one, doubled for each failure in a row, and
#: the longest.
PAUSE_S, PAUSE_MAX_S = 0.25, 30.0
#: Losses of a node within this time are counted together.
STRIKE_WINDOW_S = 60.0
#: A phase may last ``1 + YOUNG_STEPS / steps`` times the longest one so far, over at least
#: KNOWN_STEPS steps. In the first step of a membership it may last longer by so many times the
#: duration of a recovery.
YOUNG_STEPS, KNOWN_STEPS, FIRST_STEP_ALLOWANCES = 20, 2, 4.0
