"""A hand on processes that is started by exec in the container of its target, without an image.

It is a process of that container: it runs as its user, in its cgroup, and ends with it. Nothing is
left in the specification of the pod.

-> ``chaoskit/hand/from_stdin.py``: its first lines. attach/hands/start.py: other hands.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import chaoskit.hand
from chaoskit.attach.hands.attached_stream import AttachedStream
from chaoskit.attach.hands.hand import Hand, OnEvent
from chaoskit.attach.hands.hand_container import PROCESSES, ContainerExec
from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

_SOURCES = Path(chaoskit.hand.__file__).parent
_FRAME_BYTES = 32768
_REMEDY = "let its image have python3 (3.9 or later), or use an image of hands instead of exec"


def start_by_exec(
    api: KubernetesApi, pod: str, container: str, source: ContainerExec, on_event: OnEvent
) -> Hand:
    """Start a hand in a container that runs, and return it once it has answered.

    Args:
        pod: name of the pod.
        container: the container whose processes the hand acts on.
        source: how it is started.
        on_event: called with each event of the hand, by another thread.

    Raises:
        HarnessError: if the container has no Python, or its Python cannot run the hand.
        ApiError: if the server refuses the request or does not answer.
    """
    program = hand_program()
    command = [source.python, "-I", "-S", "-c", bootstrap(), str(len(program)), f"--{PROCESSES}"]
    stream = AttachedStream(api.exec(pod, container, command))
    hand = None
    try:
        for begin in range(0, len(program), _FRAME_BYTES):
            stream.send(program[begin : begin + _FRAME_BYTES])
        hand = Hand(f"hand by exec in {container} of {pod}", stream, on_event)
        hand.ask("hello")
    except (OSError, NodeUnreachable) as error:
        (hand or stream).close()
        reason = stream.complaint() or str(error)
        raise HarnessError(
            f"no hand by exec in {container} of {pod}: {reason}: {_REMEDY}"
        ) from None
    except BaseException:
        (hand or stream).close()
        raise
    return hand


@functools.cache
def bootstrap() -> str:
    """Return the program that reads the modules of a hand from its standard input."""
    return (_SOURCES / "from_stdin.py").read_text(encoding="utf-8")


@functools.cache
def hand_program() -> bytes:
    """Return the modules of a hand, as its bootstrap reads them."""
    sources = {
        ".".join(("hand", *file.relative_to(_SOURCES).with_suffix("").parts)): file.read_text(
            encoding="utf-8"
        )
        for file in sorted(_SOURCES.rglob("*.py"))
    }
    return json.dumps(sources).encode()
