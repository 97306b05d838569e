"""Which disk holds a directory, as control groups name it."""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK = Path("/sys/dev/block")


def device_of(directory: Path) -> str | None:
    """Major and minor number of the whole disk (``254:0``) below ``directory``; None for none, as below tmpfs."""
    found = directory.stat().st_dev
    name = f"{os.major(found)}:{os.minor(found)}"
    if not (_BLOCK / name).exists():
        return _mounted_from(name)
    return _whole(name)


def _mounted_from(name: str) -> str | None:
    """Of a file system that has a number of its own, such as btrfs: the device that it was mounted from."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, source = line.partition(" - ")
        path = Path(source.split()[1])
        if fields.split()[2] == name and path.is_block_device():
            device = path.stat().st_rdev
            return _whole(f"{os.major(device)}:{os.minor(device)}")
    return None


def _whole(name: str) -> str | None:
    """Limits are set for whole disks, not for partitions."""
    block = (_BLOCK / name).resolve()
    disk = block.parent if (block / "partition").is_file() else block
    return (disk / "dev").read_text().strip() if (disk / "dev").is_file() else None
