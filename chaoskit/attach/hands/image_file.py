"""The image of hands, by its name or by a file that also names its command and mounts.

-> ``hand_container.py``: the container of a hand.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.attach.hands.hand_container import HandImage, HandMeans
from chaoskit.errors import BadInput
from chaoskit.settings_file import read_document

_REMEDY = "name the image of hands (docker build --target hand), or set CHAOSKIT_HAND_IMAGE"
_OR_EXEC = f"{_REMEDY}; or ask for hands by exec, where none can be pulled"
_VARIABLE = "CHAOSKIT_HAND_IMAGE"
_FILE_SUFFIXES = (".yaml", ".yml", ".toml", ".json")


class HandImageFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file that names the image of hands.

    Attributes:
        name: name of the image.
        command: the command that starts a hand there; () for that of our own image.
        working_directory: directory in which it is started.
        mounts: volume mounts of its container, of volumes that the pods have.
    """

    name: str
    command: tuple[str, ...] = ()
    working_directory: str = ""
    mounts: tuple[dict[str, Any], ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return the fields that are set."""
        return {name: setting for name, setting in msgspec.structs.asdict(self).items() if setting}


def hand_means(image: HandImage | str, *, by_exec: bool) -> HandMeans:
    """Return the means by which hands are started.

    Args:
        image: as for :func:`read_hand_image`. Without one, hands by exec are all that there is.
        by_exec: True to start hands on processes by exec.

    Raises:
        BadInput: if there is neither an image nor exec, or the file is not valid.
    """
    if not image and not os.environ.get(_VARIABLE):
        if not by_exec:
            raise BadInput("image", image, _OR_EXEC)
        return HandMeans(None, by_exec)
    return HandMeans(read_hand_image(image), by_exec)


def read_hand_image(image: HandImage | str) -> HandImage:
    """Return the image of hands.

    Args:
        image: the image, its name, or the name of a file of :class:`HandImageFile`; "" for that of
            ``CHAOSKIT_HAND_IMAGE``.

    Raises:
        BadInput: if none is named, or the file is not valid.
    """
    if isinstance(image, HandImage):
        return image
    name = image or os.environ.get(_VARIABLE, "")
    if not name:
        raise BadInput("image", name, _REMEDY)
    if not name.endswith(_FILE_SUFFIXES):
        return HandImage(name)
    settings = read_document("image", Path(name))
    try:
        return HandImage(**msgspec.convert(settings, HandImageFile).fields())
    except msgspec.ValidationError as error:
        raise BadInput("image", name, f"mend it: {error}") from None
