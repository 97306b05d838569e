"""What two faults do to the echoes between two stations, on the kernel that this runs on.

Prints a line of JSON.
"""

from __future__ import annotations

import json

from chaoskit.substrate.core import namespaces
from chaoskit.substrate.core.echo import Echoes, open_socket
from chaoskit.substrate.core.traffic import Degrade, between
from chaoskit.substrate.network.fabric import Fabric
from chaoskit.substrate.network.wiring import Wiring, kernel_has_netem

_NEAR, _FAR = "near", "far"
_ECHOES = 60
_WAYS = between([_NEAR], [_FAR])
FAULTS = {
    "steady": Degrade(ways=_WAYS, delay_ms=20.0),
    "jitter": Degrade(ways=_WAYS, delay_ms=20.0, jitter_ms=8.0),
}


def main() -> None:
    fabric = Fabric((_NEAR, _FAR))
    wiring = Wiring(fabric)
    with namespaces.entered(fabric.stations[_NEAR].namespace):
        echoes = Echoes(open_socket())

    def quickest_ms() -> float:
        """What the network itself takes: on a busy machine all others took longer."""
        return min(echoes.round_trips_ms(fabric.stations[_FAR].address, _ECHOES, 2.0))

    found: dict[str, object] = {"netem": kernel_has_netem(), "plain_ms": quickest_ms()}
    for name, fault in FAULTS.items():
        number = wiring.impose(fault)
        found[name] = {"quickest_ms": quickest_ms(), "packets": wiring.lift(number)}
    wiring.close()
    fabric.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
