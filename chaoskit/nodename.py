"""The names of nodes: labels of RFC 1123, as for hosts, pods and control groups.

-> ``substrate/cluster/supervised.py`` (``node_names``): the names of the nodes of a run.
"""

from __future__ import annotations

import re
import socket

from chaoskit.errors import BadInput

GRAMMAR = "1 to 63 lower-case letters, digits and '-', a letter or digit at both ends"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


def is_node_name(name: object) -> bool:
    """Return whether a node can have this name."""
    return isinstance(name, str) and _LABEL.fullmatch(name) is not None


def require_node_name(field: str, name: object) -> None:
    """Raise BadInput if no node can have this name."""
    if not is_node_name(name):
        raise BadInput(field, name, f"name a node, such as node2: {GRAMMAR}")


def name_of_this_machine() -> str:
    """Return the first label of the host's name, in lower case.

    Raises:
        BadInput: if no node can have that name.
    """
    host = socket.gethostname()
    name = host.partition(".")[0].lower()
    if not is_node_name(name):
        raise BadInput("node", host, f"give this host a node name with --node: {GRAMMAR}")
    return name
