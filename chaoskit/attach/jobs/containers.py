"""The choice of the container that trains, in pods with several containers.

-> ``checks.py`` makes it for each pod of a job. ``kinds.py``: names that kinds prescribe.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaoskit.attach.jobs.kinds import JobKind
from chaoskit.errors import BadInput, name_remedy

_FIELD = "container"


def training_container(pod: str, names: Sequence[str], kind: JobKind, named: str = "") -> str:
    """Return the name of the container of a pod that trains.

    It is the one that the user named, else the only one, else the one that the kind prescribes.

    Args:
        pod: name of the pod, for messages.
        names: names of the pod's containers.
        kind: kind of the job.
        named: name that the user gave; "" for none.

    Raises:
        BadInput: if the pod has no container of that name, or several and no rule selects one.
    """
    if named:
        if named not in names:
            raise BadInput(
                _FIELD, named, f"{name_remedy(named, names)}: these are those of pod {pod}"
            )
        return named
    if len(names) == 1:
        return names[0]
    if kind.container in names:
        return kind.container
    raise BadInput(
        _FIELD, named, f"name the container that trains: pod {pod} has {', '.join(names)}"
    )
