"""The processes of a command that had a rank, as their nodes report them.

-> substrate/core/launched_ranks.py: the variables that show a rank, and the search for processes.
"""

from __future__ import annotations

from collections.abc import Iterable

from chaoskit.journal import Record
from chaoskit.substrate.core.launched_ranks import VARIABLES, strength
from chaoskit.vocabulary import Event


def variable_of(record: Record) -> str:
    """Return the environment variable that shows the rank of a process.

    A record without it, as older versions wrote, gives the first variable of ``VARIABLES``.
    """
    return str(record.get("variable", VARIABLES[0]))


def ranks_found(records: Iterable[Record]) -> list[Record]:
    """Return the records of processes with a rank, in the order of ``records``.

    Only processes with the strongest variable count. Those with a weaker one are launchers of the
    others. The list is empty if no process showed its rank.
    """
    rank_records = [record for record in records if record.event == Event.RANK_FOUND]
    strongest = min(map(variable_of, rank_records), key=strength, default="")
    return [record for record in rank_records if variable_of(record) == strongest]
