"""Account of a run's time: a fold over its journals, record by record, of a finished or a running
run.

-> experiment/run/recovery_timeline.py: the recoveries of an outcome, which a test asserts on.
"""

from __future__ import annotations

from chaoskit.runlog.account.accountant import UNHEARD, Accountant, account_for
from chaoskit.runlog.account.spending import KEPT_S

__all__ = ["KEPT_S", "UNHEARD", "Accountant", "account_for"]
