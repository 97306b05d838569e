"""Lookup of the disk below a directory, as control groups name it.

-> ``limits/holds.py`` limits the writes to this disk.
"""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK = Path("/sys/dev/block")


def device_of(directory: Path) -> str | None:
    """Return the major and minor number (``254:0``) of the whole disk below ``directory``.

    None is returned if there is none, as on tmpfs. Raises OSError if the directory is missing.
    """
    number = directory.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    if not (_BLOCK / name).exists():
        return _mounted_from(name)
    return _whole_disk(name)


def _mounted_from(name: str) -> str | None:
    """Return the disk below a file system with a device number of its own, such as btrfs.

    None is returned if it is mounted from no block device.
    """
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, source = line.partition(" - ")
        path = Path(source.split()[1])
        if fields.split()[2] == name and path.is_block_device():
            device = path.stat().st_rdev
            return _whole_disk(f"{os.major(device)}:{os.minor(device)}")
    return None


def _whole_disk(name: str) -> str | None:
    """Return the whole disk that a partition belongs to, as limits are set for whole disks.

    Both are given by major and minor number, such as ``254:0``. None is returned if the kernel
    shows no such disk.
    """
    block = (_BLOCK / name).resolve()
    disk = block.parent if (block / "partition").is_file() else block
    return (disk / "dev").read_text().strip() if (disk / "dev").is_file() else None
