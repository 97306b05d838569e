"""What the directory of a run holds of its coordinator: its record, and where it is once it has moved."""

from __future__ import annotations

from pathlib import Path

import msgspec

Address = tuple[str, int]
#: The file with its decisions, in that directory.
RECORD = "coordinator.record"


class CoordinatorAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host and port of each of its listeners.

    Attributes:
        control: for agents and observers.
        store: where the members of a generation find each other.
    """

    control: Address
    store: Address

    def latest(self, run_directory: str | Path) -> CoordinatorAddress:
        """Where it is now: what was written since into the run's directory on this node, else this.

        Raises:
            msgspec.MsgspecError: if what was written there is something else. OSError: if it cannot be read.
        """
        try:
            data = address_file(run_directory).read_bytes()
        except FileNotFoundError:
            return self
        return msgspec.json.decode(data, type=CoordinatorAddress)


def address_file(run_directory: str | Path) -> Path:
    """The file of a node that says where the coordinator has moved; there is none before."""
    return Path(run_directory) / "coordinator.json"
