"""Time account of a run for reports: a table for terminals, and sentences for all reports.

-> runlog/account/time_account.py: the account and its formulas. report/words.py: explanations.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from chaoskit.plaintext import plural
from chaoskit.report.summary import duration, share
from chaoskit.runlog.account.time_account import PRODUCTIVE, TimeAccount

_BAR = 24
_PER_WALL = "per wall-clock hour (Meta, HPCA'25): trained / wall; waits and start-up count"
_PER_PRODUCTIVE = "per productive hour: MTTF / (MTTF + MTTR); failures alone count"


def ratios(account: TimeAccount) -> list[tuple[str, str, str]]:
    """Return the name, the formatted value and the convention of each ratio."""
    return [
        ("goodput", share(account.goodput), "productive / wall time"),
        ("ETTR", share(account.ettr_wall), _PER_WALL),
        ("ETTR", share(account.ettr_productive), _PER_PRODUCTIVE),
    ]


def lost_sentence(account: TimeAccount) -> str:
    """Return the lost time by cause, the largest first.

    An example: ``lost: start-up 1.8 s, ended 220 ms``.
    """
    causes = sorted(account.lost_s.items(), key=lambda cause_seconds: -cause_seconds[1])
    return "lost: " + (
        ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in causes) or "nothing"
    )


def failures_sentence(account: TimeAccount) -> str:
    """Return a sentence about the number of failures, MTTR and MTTF; "" without a failure."""
    if not account.failures:
        return ""
    mttr, mttf = duration(account.mean_recovery_s), duration(account.mean_between_failures_s)
    return f"{plural(account.failures, 'failure')}: MTTR {mttr} (lost / failures), MTTF {mttf} (trained / failures)"


def degraded_sentence(account: TimeAccount) -> str:
    """Return a sentence about the time with fewer ranks than the full world; "" without any."""
    if not account.degraded_s:
        return ""
    duration_text = f"{duration(account.degraded_s)} with fewer ranks than the full world"
    return f"degraded: {duration_text}, {share(account.degraded_share)} of productive time"


def render_account(account: TimeAccount) -> RenderableType:
    """Return the parts of the time as bars, followed by ratios and causes."""
    lines = [Text(f"where the time went: {duration(account.wall_s)}")]
    for name, seconds in account.parts():
        if seconds:
            part = seconds / account.wall_s
            bar = "█" * round(_BAR * part)
            style = "green" if name == PRODUCTIVE else "yellow"
            lines.append(
                Text.assemble(
                    f"  {name:<17}  {duration(seconds):>8}  {share(part):>8}  ", (bar, style)
                )
            )
    lines += [
        Text.assemble(f"  {name:<17}  ", (f"{text:>8}", "bold"), (f"  {convention}", "dim"))
        for name, text, convention in ratios(account)
    ]
    sentences = [lost_sentence(account), failures_sentence(account), degraded_sentence(account)]
    return Group(*lines, *(Text(f"  {sentence}") for sentence in sentences if sentence))
