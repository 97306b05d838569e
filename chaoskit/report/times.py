"""Where the time of a run went, for people: a table for terminals, and the sentences that every face shares."""

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
    """Name, value and convention of each ratio."""
    return [
        ("goodput", share(account.goodput), "productive / wall time"),
        ("ETTR", share(account.ettr_wall), _PER_WALL),
        ("ETTR", share(account.ettr_productive), _PER_PRODUCTIVE),
    ]


def lost_sentence(account: TimeAccount) -> str:
    """``lost: start-up 1.8 s, ended 220 ms``; the largest first."""
    causes = sorted(account.lost_s.items(), key=lambda item: -item[1])
    return "lost: " + (
        ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in causes) or "nothing"
    )


def failures_sentence(account: TimeAccount) -> str:
    """How often, how dear, how far apart; "" without a failure."""
    if not account.failures:
        return ""
    mttr, mttf = duration(account.mean_recovery_s), duration(account.mean_between_failures_s)
    return f"{plural(account.failures, 'failure')}: MTTR {mttr} (lost / failures), MTTF {mttf} (trained / failures)"


def degraded_sentence(account: TimeAccount) -> str:
    """How long the world was too small; "" if it never was."""
    if not account.degraded_s:
        return ""
    much = f"{duration(account.degraded_s)} with fewer ranks than the full world"
    return f"degraded: {much}, {share(account.degraded_share)} of productive time"


def render_account(account: TimeAccount) -> RenderableType:
    """The parts as bars, then ratios and causes."""
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
        Text.assemble(f"  {name:<17}  ", (f"{value:>8}", "bold"), (f"  {convention}", "dim"))
        for name, value, convention in ratios(account)
    ]
    sentences = [lost_sentence(account), failures_sentence(account), degraded_sentence(account)]
    return Group(*lines, *(Text(f"  {sentence}") for sentence in sentences if sentence))
