"""The hand: a small program that breaks a training process beside which it runs, on command.

It runs in an ephemeral container of a pod, in one of two roles: on the processes of a container,
or on the network of a pod. It imports the standard library only, so that its directory alone can be
copied into an image: ``python3 -m hand --processes``.

-> ``hand/server.py``: the loop; ``hand/lines.py``: the protocol; ``hand/processes/operations.py`` and
``hand/network/operations.py``: the two roles.
"""

from __future__ import annotations

#: Version of the protocol, which each answer to ``hello`` has.
PROTOCOL = 1
#: Name of the program in lists of processes (comm, at most 15 bytes). A job's processes have others.
PROGRAM_NAME = "chaoskit-hand"
