"""Where did the time go? A fold over the journals of a run, record by record, finished or not."""

from __future__ import annotations

from chaoskit.experiment.accounting.accountant import UNHEARD, Accountant, account_for
from chaoskit.experiment.accounting.spending import KEPT_S

__all__ = ["KEPT_S", "UNHEARD", "Accountant", "account_for"]
