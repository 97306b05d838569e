"""The processes of a command that had a rank, by the word of their nodes."""

from __future__ import annotations

from collections.abc import Iterable

from chaoskit.journal import Record
from chaoskit.substrate.core.launched_ranks import VARIABLES, strength
from chaoskit.vocabulary import Event


def variable_of(record: Record) -> str:
    """Return the variable that told a process its rank; records of older runs know one only."""
    return str(record.get("variable", VARIABLES[0]))


def ranks_found(records: Iterable[Record]) -> list[Record]:
    """Return the records of processes with a rank, by the strongest variable that any of them had.

    Those with a weaker one are launchers of the others.
    """
    found = [record for record in records if record.event == Event.RANK_FOUND]
    strongest = min(map(variable_of, found), key=strength, default="")
    return [record for record in found if variable_of(record) == strongest]
