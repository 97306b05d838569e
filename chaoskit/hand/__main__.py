"""Entry point of the hand: ``python3 -m hand --processes`` or ``python3 -m hand --network``."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys

from . import PROGRAM_NAME
from .network.operations import NetworkRole
from .processes.operations import ProcessRole
from .server import HandServer

_SILENT_MAX_S = 3600.0


def main() -> int:
    """Serve the client on the standard streams, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="hand",
        description="Break a training process on command. Requests are lines of JSON on stdin.",
    )
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--processes", action="store_true", help="act on processes")
    role.add_argument("--network", action="store_true", help="act on the network")
    parser.add_argument(
        "--silent-s",
        type=_duration_s,
        default=10.0,
        help="end all effects and the program after so many seconds without a line (default: 10)",
    )
    options = parser.parse_args()
    _set_program_name()
    make_role = ProcessRole if options.processes else NetworkRole
    server = HandServer(make_role, options.silent_s, sys.stdin.fileno(), sys.stdout.fileno())
    reason = server.run()
    print(f"hand: {reason}", file=sys.stderr)
    return 0


def _set_program_name() -> None:
    """Set the name of this process in lists of processes, by which clients leave it out."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(PROGRAM_NAME)


def _duration_s(text: str) -> float:
    """Return a duration in seconds.

    Raises:
        argparse.ArgumentTypeError: if it is not above 0 and up to an hour.
    """
    try:
        duration_s = float(text)
    except ValueError:
        duration_s = math.nan
    if not 0 < duration_s <= _SILENT_MAX_S:
        raise argparse.ArgumentTypeError(f"give seconds above 0 and up to {_SILENT_MAX_S:g}")
    return duration_s


if __name__ == "__main__":
    sys.exit(main())
