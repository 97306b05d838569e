"""A client of a hand that waits to be killed:
``python -m benchmarks.pods.hand_client NAMESPACE POD UID ROLE IMAGE``.

It starts a hand, lets it stop the first process of the pod or cut the pod off from an address, and
prints a line. IMAGE is the image of hands in JSON. Cluster: $KUBECONFIG.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from benchmarks.pods.hand_pods import ADDRESS, CONTAINER
from chaoskit.attach.hands.hand import Hand
from chaoskit.attach.hands.hand_container import NETWORK, PROCESSES, HandImage
from chaoskit.attach.hands.start import HandPod, start_hand
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

_LASTS_S = 600.0


def stop(hand: Hand) -> None:
    """Stop the first process of the pod."""
    first = next(process for process in hand.ask("list")["processes"] if process["pid"] == 1)
    hand.ask("stop", pid=1, ticks=first["ticks"], lasts_s=_LASTS_S)


def main() -> None:
    namespace, pod, uid, role, image = sys.argv[1:]
    api = KubernetesApi(kubeconfig=os.environ["KUBECONFIG"], namespace=namespace)
    name, command, directory, mounts = json.loads(image)
    hand_image = HandImage(name, tuple(command), directory, tuple(mounts))
    if role == PROCESSES:
        stop(start_hand(api, HandPod(pod, uid), CONTAINER, PROCESSES, hand_image))
    else:
        hand = start_hand(api, HandPod(pod, uid), CONTAINER, NETWORK, hand_image)
        hand.ask("cut", addresses=[ADDRESS], lasts_s=_LASTS_S)
    print("in effect", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
