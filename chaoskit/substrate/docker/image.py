"""What containers are made of: an image with chaoskit in it, or this host's own Python through read-only mounts.

For the second, the image is a skeleton of some directories and links, imported from memory: nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaoskit
from chaoskit.errors import BadInput, HarnessError
from chaoskit.substrate.undo.docker_janitor import labels

_SKELETON = "chaoskit-skeleton"
#: Not that of containers, which would inherit it: also those that something else makes of the image.
_IMAGE_LABEL = "chaoskit.image"
_DIRECTORIES = ("dev", "etc", "proc", "root", "run", "sys", "usr", "var")
_SHARED_DIRECTORIES = ("tmp", "var/tmp")
#: In the root of most systems links into /usr; where they are directories, they are mounted.
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64")
_SETTINGS = ("passwd", "group", "nsswitch.conf", "ld.so.cache", "localtime")
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_VERSION = "from importlib.metadata import version; import chaoskit.substrate.supervisor.server; print(version('chaoskit'))"


@dataclass
class Recipe:
    """How containers are made.

    Attributes:
        image: its name. python: the interpreter in it.
        environment: of its processes. working_directory: theirs.
        read_only, writable: directories of the host, seen at the same paths.
    """

    image: str
    python: str
    environment: dict[str, str]
    working_directory: str = "/"
    read_only: frozenset[Path] = frozenset()
    writable: frozenset[Path] = field(default=frozenset())

    def with_directories(self, read_only: Iterable[Path], writable: Iterable[Path]) -> Recipe:
        """The same with further directories; itself, if all of them can be seen already."""
        may_write = self.writable | {path for path in writable if not _lies_in(path, self.writable)}
        may_read = self.read_only | {
            path for path in read_only if not _lies_in(path, self.read_only | may_write)
        }
        if (may_write, may_read) == (self.writable, self.read_only):
            return self
        return Recipe(
            self.image, self.python, self.environment, self.working_directory, may_read, may_write
        )

    def mounts(self) -> list[Any]:
        """For the SDK; directories that lie in another one of the same kind are left out."""
        from docker.types import Mount

        reading = [path for path in outermost(self.read_only) if path not in self.writable]
        chosen = [(path, True) for path in reading] + [
            (path, False) for path in outermost(self.writable)
        ]
        return [
            Mount(str(path), str(path), type="bind", read_only=read_only)
            for path, read_only in chosen
        ]


def _lies_in(path: Path, directories: Iterable[Path]) -> bool:
    return any(path.is_relative_to(directory) for directory in directories)


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Those that lie in none of the others."""
    kept: list[Path] = []
    for path in sorted(set(paths)):
        if not _lies_in(path, kept):
            kept.append(path)
    return kept


# -- this host's Python -------------------------------------------------------------------------------------------


def host_recipe(client: Any) -> Recipe:
    """Containers that see Python, its packages and chaoskit as they are on this host. Raises the SDK's errors."""
    directories = frozenset(host_directories())
    here = Path.cwd()
    working_directory = str(here) if _lies_in(here, directories) else "/"
    python = os.path.abspath(sys.executable)  # noqa: PTH100 - not resolved: an environment is known by its link
    return Recipe(
        _skeleton(client), python, {**os.environ, **_THREADS}, working_directory, directories
    )


def host_directories() -> list[Path]:
    """Where this interpreter, its packages and chaoskit lie; and the working directory: jobs may import from there."""
    sources = [Path(next(iter(chaoskit.__path__))).parent]  # of an editable installation
    roots = [Path("/", name) for name in _LINKS if not Path("/", name).is_symlink()]
    named = [
        Path("/usr"),
        *roots,
        Path(sys.prefix),
        Path(sys.base_prefix),
        *sources,
        Path.cwd(),
        *map(Path, sys.path),
    ]
    real = [path.resolve() for path in named]
    return outermost(
        path
        for path in (*named, *real)
        if path.is_absolute() and path.is_dir() and path != Path("/")
    )


def _skeleton(client: Any) -> str:
    """The name of the image, which is made where the daemon does not have it."""
    from docker.errors import ImageNotFound

    data = skeleton_archive()
    tag = hashlib.sha256(data).hexdigest()[:12]
    name = f"{_SKELETON}:{tag}"
    try:
        client.images.get(name)
    except ImageNotFound:
        client.api.import_image_from_data(
            data, repository=_SKELETON, tag=tag, changes=[f"LABEL {_IMAGE_LABEL}=1"]
        )
    return name


def skeleton_archive() -> bytes:
    """The image's files as a tar archive; the same bytes every time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in _DIRECTORIES:
            archive.addfile(_entry(name, tarfile.DIRTYPE, 0o755))
        for name in _SHARED_DIRECTORIES:
            archive.addfile(_entry(name, tarfile.DIRTYPE, 0o1777))
        for name in _LINKS:
            if (link := Path("/", name)).is_symlink():
                archive.addfile(_entry(name, tarfile.SYMTYPE, target=os.readlink(link)))
        for name in _SETTINGS:
            if (path := Path("/etc", name)).is_file():
                data = path.read_bytes()
                archive.addfile(
                    _entry(f"etc/{name}", tarfile.REGTYPE, 0o644, size=len(data)), io.BytesIO(data)
                )
        archive.addfile(_entry("etc/alternatives", tarfile.DIRTYPE, 0o755))
        for link in sorted(Path("/etc/alternatives").glob("*")):
            if link.is_symlink():
                archive.addfile(
                    _entry(
                        f"etc/alternatives/{link.name}", tarfile.SYMTYPE, target=os.readlink(link)
                    )
                )
    return buffer.getvalue()


def _entry(
    name: str, kind: bytes, mode: int = 0o777, *, target: str = "", size: int = 0
) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname, entry.size = kind, mode, target, size
    return entry


# -- an image with chaoskit in it ---------------------------------------------------------------------------------


def image_recipe(client: Any, image: str) -> Recipe:
    """Containers of an image that has Python, torch and chaoskit.

    Raises:
        BadInput: if it has not, or another version of chaoskit.
    """
    ours = importlib.metadata.version("chaoskit")
    status, said = _version_in(client, image)
    if status != 0:
        last = "".join(said.splitlines()[-1:])
        raise BadInput(
            "docker image", image, f"use one in which `python3 -c 'import chaoskit'` works: {last}"
        )
    if said != ours:
        raise BadInput(
            "docker image", image, f"use one with chaoskit {ours}, as it is here: it has {said}"
        )
    own = client.images.get(image).attrs["Config"]["Env"] or []
    settings = {name: value for name, value in os.environ.items() if name.startswith("CHAOSKIT_")}
    return Recipe(
        image, "python3", {**dict(entry.split("=", 1) for entry in own), **settings, **_THREADS}
    )


def _version_in(client: Any, image: str) -> tuple[int, str]:
    """Status and words of Python in the image when it is asked for chaoskit's version."""
    from docker.errors import APIError, ImageNotFound

    try:
        container = client.containers.create(
            image, ["-c", _VERSION], entrypoint="python3", network_mode="none", labels=labels()
        )
    except ImageNotFound:
        raise BadInput(
            "docker image", image, "build or pull it first: the daemon does not have it"
        ) from None
    try:
        container.start()
        return int(container.wait()["StatusCode"]), str(
            container.logs().decode(errors="replace").strip()
        )
    except APIError as error:
        if error.is_server_error() and not _is_missing(error):
            raise HarnessError(f"Docker cannot run {image}: {error.explanation}") from error
        raise BadInput(
            "docker image", image, f"use one with python3 in it: {error.explanation}"
        ) from None
    finally:
        container.remove(force=True)


def _is_missing(error: Any) -> bool:
    """Whether the image does not have the program: then the daemon blames itself, by version."""
    return "executable file not found" in str(error.explanation) or "no such file" in str(
        error.explanation
    )
