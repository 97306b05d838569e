"""The table of faults that a run would inject into a job that already runs.

-> attach/fault_preview.py: the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaoskit.attach.fault_preview import FaultPreview
from chaoskit.report.tables import Column, DataTable


def render_faults(previews: Sequence[FaultPreview]) -> DataTable:
    """Return a table with a row for each fault and each node that it strikes."""
    table = DataTable(
        Column("fault", is_heading=True),
        Column("moment", is_text=True),
        Column("node"),
        Column("pod"),
        Column("uid"),
        Column("ranks", is_text=True),
        Column("hands", is_text=True),
        Column("Pod Security", is_text=True),
        Column("refused", is_text=True),
    )
    for row in previews:
        table.add_row(
            row.fault,
            row.moment,
            row.node or "any",
            row.pod or "any",
            row.uid or "any",
            ", ".join(map(str, row.ranks)) or ("not read" if row.node else "any"),
            ", ".join(row.hands) or "none",
            row.security or "any",
            row.refusal or "no",
        )
    return table
