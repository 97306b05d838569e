"""Blocks ways between nodes until it is killed: ``traffic_client.py LASTS_S NODE ...``.

Each node is ``NAME,ADDRESS,INPUT_FD,OUTPUT_FD``, with the descriptors of its hand. The ways between
the first node and all others are blocked. The program writes ``blocked`` then.

-> ``support/hand/traffic.py`` has the nodes.
"""

from __future__ import annotations

import signal
import sys

from chaoskit.attach.hands.hand import Hand
from chaoskit.attach.hands.traffic import HandTraffic
from chaoskit.substrate.core.traffic import Block, between
from support.hand.pipe_stream import PipeStream
from support.waiting import LIMIT_S


def main() -> None:
    """Block the ways, and wait."""
    lasts_s, *nodes = sys.argv[1:]
    hands, addresses = {}, {}
    for node in nodes:
        name, addresses[name], input_fd, output_fd = node.split(",")
        hands[name] = Hand(name, PipeStream(int(input_fd), int(output_fd)))
        hands[name].ask("hello", limit_s=LIMIT_S)
    traffic = HandTraffic(hands.__getitem__, addresses.__getitem__, lasts_s=float(lasts_s))
    first, *others = hands
    traffic.apply("", Block(ways=between([first], others)))
    print("blocked", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
