"""Images of containers: one that has chaoskit, or this host's own Python through read-only mounts.

For this host's Python, the image is a skeleton of directories and links. It is imported from
memory; nothing is downloaded.

-> docker/substrate.py adds the directories of the job and of the run; container.py creates.
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
#: Label of the image. It is not the label of containers, because any container inherits it.
_IMAGE_LABEL = "chaoskit.image"
_DIRECTORIES = ("dev", "etc", "proc", "root", "run", "sys", "usr", "var")
_SHARED_DIRECTORIES = ("tmp", "var/tmp")
#: Links into /usr in the root of most systems. Where they are directories, they are mounted.
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64")
_SYSTEM_FILES = ("passwd", "group", "nsswitch.conf", "ld.so.cache", "localtime")
_THREAD_VARIABLES = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
_PRINT_VERSION = (
    "from importlib.metadata import version; "
    "import chaoskit.substrate.supervisor.server; print(version('chaoskit'))"
)


@dataclass
class Recipe:
    """The properties of containers to be made.

    Attributes:
        image: name of the image.
        python: the interpreter in the image.
        environment: environment of the processes in the containers.
        working_directory: working directory of these processes.
        read_only: directories of the host that are mounted read-only at the same paths.
        writable: directories of the host that are mounted for writing at the same paths.
    """

    image: str
    python: str
    environment: dict[str, str]
    working_directory: str = "/"
    read_only: frozenset[Path] = frozenset()
    writable: frozenset[Path] = field(default=frozenset())

    def with_directories(self, read_only: Iterable[Path], writable: Iterable[Path]) -> Recipe:
        """Return a recipe with further directories, or this one if it has all of them."""
        all_writable = self.writable | {
            path for path in writable if not _lies_in(path, self.writable)
        }
        all_read_only = self.read_only | {
            path for path in read_only if not _lies_in(path, self.read_only | all_writable)
        }
        if (all_writable, all_read_only) == (self.writable, self.read_only):
            return self
        return Recipe(
            self.image,
            self.python,
            self.environment,
            self.working_directory,
            all_read_only,
            all_writable,
        )

    def mounts(self) -> list[Any]:
        """Return the mounts for the SDK.

        Directories within another one of the same kind are left out. A directory of both kinds is
        mounted for writing.
        """
        from docker.types import Mount

        reading = [path for path in outermost(self.read_only) if path not in self.writable]
        mounted = [(path, True) for path in reading] + [
            (path, False) for path in outermost(self.writable)
        ]
        return [
            Mount(str(path), str(path), type="bind", read_only=read_only)
            for path, read_only in mounted
        ]


def _lies_in(path: Path, directories: Iterable[Path]) -> bool:
    return any(path.is_relative_to(directory) for directory in directories)


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that lie in none of the others, sorted and each once."""
    kept: list[Path] = []
    for path in sorted(set(paths)):
        if not _lies_in(path, kept):
            kept.append(path)
    return kept


# -- this host's Python ----------------------------------------------------------------------------


def host_recipe(client: Any) -> Recipe:
    """Return a recipe for containers that see this host's Python, its packages and chaoskit.

    The skeleton image is created in the daemon if it is missing. Raises the SDK's errors.
    """
    directories = frozenset(host_directories())
    current = Path.cwd()
    working_directory = str(current) if _lies_in(current, directories) else "/"
    # not resolved: a virtual environment is found by its link
    python = os.path.abspath(sys.executable)  # noqa: PTH100
    return Recipe(
        _skeleton(client),
        python,
        {**os.environ, **_THREAD_VARIABLES},
        working_directory,
        directories,
    )


def host_directories() -> list[Path]:
    """Return the directories of this interpreter, its packages and chaoskit, and the current one.

    Jobs may import from the current directory. Directories within another one, and those that do
    not exist, are left out.
    """
    sources = [Path(next(iter(chaoskit.__path__))).parent]  # parent of an editable installation
    roots = [Path("/", name) for name in _LINKS if not Path("/", name).is_symlink()]
    paths = [
        Path("/usr"),
        *roots,
        Path(sys.prefix),
        Path(sys.base_prefix),
        *sources,
        Path.cwd(),
        *map(Path, sys.path),
    ]
    resolved = [path.resolve() for path in paths]
    return outermost(
        path
        for path in (*paths, *resolved)
        if path.is_absolute() and path.is_dir() and path != Path("/")
    )


def _skeleton(client: Any) -> str:
    """Return the name of the skeleton image. The image is made if the daemon does not have it."""
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
    """Return the files of the skeleton image as a tar archive.

    The bytes are the same as long as the links and system files of this host are.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in _DIRECTORIES:
            archive.addfile(_member(name, tarfile.DIRTYPE, 0o755))
        for name in _SHARED_DIRECTORIES:
            archive.addfile(_member(name, tarfile.DIRTYPE, 0o1777))
        for name in _LINKS:
            if (link := Path("/", name)).is_symlink():
                archive.addfile(_member(name, tarfile.SYMTYPE, target=os.readlink(link)))
        for name in _SYSTEM_FILES:
            if (path := Path("/etc", name)).is_file():
                data = path.read_bytes()
                archive.addfile(
                    _member(f"etc/{name}", tarfile.REGTYPE, 0o644, size=len(data)), io.BytesIO(data)
                )
        archive.addfile(_member("etc/alternatives", tarfile.DIRTYPE, 0o755))
        for link in sorted(Path("/etc/alternatives").glob("*")):
            if link.is_symlink():
                archive.addfile(
                    _member(
                        f"etc/alternatives/{link.name}", tarfile.SYMTYPE, target=os.readlink(link)
                    )
                )
    return buffer.getvalue()


def _member(
    name: str, kind: bytes, mode: int = 0o777, *, target: str = "", size: int = 0
) -> tarfile.TarInfo:
    """Return a member of the tar archive."""
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.linkname, member.size = kind, mode, target, size
    return member


# -- an image with chaoskit in it ------------------------------------------------------------------


def image_recipe(client: Any, image: str) -> Recipe:
    """Return a recipe for containers of an image that has Python, torch and chaoskit.

    A container of the image is run to find out.

    Raises:
        BadInput: if the daemon does not have the image, or it lacks Python or chaoskit, or has
            another version of it.
        HarnessError: if Docker cannot run the image for another reason. Other errors of the SDK are
            raised as they are.
    """
    version = importlib.metadata.version("chaoskit")
    status, output = _version_output(client, image)
    if status != 0:
        last_line = "".join(output.splitlines()[-1:])
        raise BadInput(
            "docker image",
            image,
            f"use an image in which `python3 -c 'import chaoskit'` works: {last_line}",
        )
    if output != version:
        raise BadInput(
            "docker image",
            image,
            f"use an image with chaoskit {version}, the version on this machine: it has {output}",
        )
    image_environment = client.images.get(image).attrs["Config"]["Env"] or []
    own_variables = {
        name: value for name, value in os.environ.items() if name.startswith("CHAOSKIT_")
    }
    return Recipe(
        image,
        "python3",
        {
            **dict(assignment.split("=", 1) for assignment in image_environment),
            **own_variables,
            **_THREAD_VARIABLES,
        },
    )


def _version_output(client: Any, image: str) -> tuple[int, str]:
    """Return exit status and output of Python in the image when it prints chaoskit's version.

    The output is the version if the status is 0, otherwise an error of Python.

    Raises:
        BadInput: if the daemon does not have the image, or the image has no Python.
        HarnessError: if Docker cannot run the image for another reason.
    """
    from docker.errors import APIError, ImageNotFound

    try:
        container = client.containers.create(
            image,
            ["-c", _PRINT_VERSION],
            entrypoint="python3",
            network_mode="none",
            labels=labels(),
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
        if error.is_server_error() and not _is_program_missing(error):
            raise HarnessError(f"Docker cannot run {image}: {error.explanation}") from error
        raise BadInput(
            "docker image", image, f"use an image with python3: {error.explanation}"
        ) from None
    finally:
        container.remove(force=True)


def _is_program_missing(error: Any) -> bool:
    """Return whether the error means that the image lacks the program.

    Some versions of the daemon report that as a server error.
    """
    return "executable file not found" in str(error.explanation) or "no such file" in str(
        error.explanation
    )
