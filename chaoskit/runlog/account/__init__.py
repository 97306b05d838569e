"""Where did the time go? A fold over the journals of a run, record by record, finished or not."""

from __future__ import annotations

from chaoskit.runlog.account.accountant import UNHEARD, Accountant, account_for
from chaoskit.runlog.account.spending import KEPT_S

__all__ = ["KEPT_S", "UNHEARD", "Accountant", "account_for"]
