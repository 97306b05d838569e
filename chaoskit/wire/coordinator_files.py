"""Files of the coordinator in the directory of a run: its log, and its address after a move.

-> coordinator/log.py: the content of the log; substrate/kubernetes/substrate.py writes the address
after a move. agent/coordinator_link.py reads it for each attempt to connect.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

Address = tuple[str, int]
#: Name of the write-ahead log of the coordinator (:mod:`chaoskit.coordinator.log`).
COORDINATOR_LOG = "coordinator.wal"


class CoordinatorAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host and port of each listener of the coordinator.

    Attributes:
        control: listener for agents and observers.
        store: listener at which the members of a generation find each other.
    """

    control: Address
    store: Address

    def latest(self, run_directory: str | Path) -> CoordinatorAddress:
        """Return the current address: that in :func:`address_file`, or this one if there is none.

        Raises:
            msgspec.MsgspecError: if the file has other content.
            OSError: if the file cannot be read.
        """
        try:
            data = address_file(run_directory).read_bytes()
        except FileNotFoundError:
            return self
        return msgspec.json.decode(data, type=CoordinatorAddress)


def address_file(run_directory: str | Path) -> Path:
    """Return the path of the file with the address of a coordinator that has moved.

    Each node has one in its run directory, but not before the first move.
    """
    return Path(run_directory) / "coordinator.json"
