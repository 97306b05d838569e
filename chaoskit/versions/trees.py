"""Checkouts of a repository's versions, without traces in the user's repository.

-> versions/arm.py: names of versions, with an environment. versions/run.py: tests in a checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from chaoskit.errors import BadInput

#: The name of the files as they are now, including uncommitted ones.
WORKING_TREE = "."
#: The name of the commit where the branch of HEAD left the branch that it is to be merged into.
MERGE_BASE = "merge-base"
#: The name of the commit of the last good night, which is found in a history, not by git:
#: cli/testing/compare.py and nightly/run.py look it up.
LAST_GOOD = "last-good"
#: The target branches that are tried if neither CI nor the repository names one.
_MAINLINES = ("origin/HEAD", "origin/main", "origin/master", "main", "master")
_AUTHOR = ("-c", "user.name=chaoskit", "-c", "user.email=chaoskit@localhost")
_PATIENCE_S = 120.0


class Repository:
    """The user's repository, which is only read.

    Args:
        directory: a directory in the repository.
        scratch: a directory for objects and an index of our own.

    Attributes:
        root: the uppermost directory of the repository.

    Raises:
        BadInput: if the directory is in no repository.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        self._objects, self._index = scratch / "objects", scratch / "index"
        try:
            self.root = Path(_git(directory, "rev-parse", "--show-toplevel"))
        except _GitError as error:
            raise BadInput(
                "directory", str(directory), f"run the command in a git repository: {error}"
            ) from None

    def commit_of(self, version: str) -> str:
        """Return the commit of a version: a revision, :data:`MERGE_BASE`, or :data:`WORKING_TREE`.

        For a changed working tree, the commit is made, with its objects in ``scratch``. Of an
        unchanged one, it is HEAD.

        Raises:
            BadInput: if there is no such commit.
        """
        if version == WORKING_TREE:
            return self._working_tree()
        if version == MERGE_BASE:
            return self._merge_base()
        try:
            return _git(
                self.root,
                "rev-parse",
                "--verify",
                "--quiet",
                "--end-of-options",
                f"{version}^{{commit}}",
            )
        except _GitError:
            remedy = (
                "name a commit, a branch, merge-base, '.' for the files as they are, or env:PATH"
            )
            raise BadInput(
                "version", version, f"{remedy}; a shallow clone has no other commit"
            ) from None

    @property
    def head(self) -> str:
        """The commit that is checked out."""
        return _git(self.root, "rev-parse", "HEAD")

    def _working_tree(self) -> str:
        """Make a commit of all files that git does not ignore, on no branch, and return it.

        It is HEAD if no file is changed. Raise BadInput if git fails.
        """
        variables = {
            "GIT_INDEX_FILE": str(self._index),
            "GIT_OBJECT_DIRECTORY": str(self._objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(self._git_path("objects")),
        }
        try:
            self._objects.mkdir(exist_ok=True)
            # the copy keeps the modification time, by which git knows which files it must read
            shutil.copy2(self._git_path("index"), self._index)
            _git(self.root, "add", "--all", **variables)
            tree = _git(self.root, "write-tree", **variables)
            if tree == _git(self.root, "rev-parse", "HEAD^{tree}"):
                return self.head
            return _git(
                self.root,
                *_AUTHOR,
                "commit-tree",
                tree,
                "-p",
                "HEAD",
                "-m",
                "the working tree",
                **variables,
            )
        except (_GitError, OSError) as error:
            raise BadInput("version", WORKING_TREE, f"commit your changes: {error}") from None

    def _merge_base(self) -> str:
        """Return the merge base that CI names, or that with the target branch.

        Raise BadInput if there is none.
        """
        if base := os.environ.get("CI_MERGE_REQUEST_DIFF_BASE_SHA"):  # set by GitLab
            return self.commit_of(base)
        target = os.environ.get("GITHUB_BASE_REF")
        for mainline in (f"origin/{target}",) if target else _MAINLINES:
            try:
                return _git(self.root, "merge-base", "HEAD", mainline)
            except _GitError:
                continue
        remedy = f"fetch {target or 'the main branch'} with its history (actions/checkout: fetch-depth: 0)"
        raise BadInput("version", MERGE_BASE, f"{remedy}, or name a commit")

    def check_out(self, commit: str, directory: Path) -> None:
        """Check out a commit into a directory, as a repository that reads the objects of this one.

        Raises:
            BadInput: if it cannot be checked out.
        """
        try:
            _git(self.root, "init", "--quiet", str(directory))
            git_directory = directory / ".git"
            (git_directory / "objects/info/alternates").write_text(
                f"{self._git_path('objects')}\n{self._objects}\n"
            )
            if (shallow := self._git_path("shallow")).is_file():
                (git_directory / "shallow").write_bytes(shallow.read_bytes())
            _git(directory, "checkout", "--quiet", "--detach", commit)
        except (_GitError, OSError) as error:
            raise BadInput(
                "version", commit, f"name a commit that git can check out: {error}"
            ) from None

    def _git_path(self, name: str) -> Path:
        """Return the path of a file in the git directory."""
        return (self.root / _git(self.root, "rev-parse", "--git-path", name)).resolve()


class _GitError(Exception):
    """A git command failed."""


def _git(directory: Path, *arguments: str, **environment: str) -> str:
    """Return the output of a git command. Raise _GitError if it fails.

    Args:
        environment: variables that the command gets in addition.
    """
    command = ["git", "-C", str(directory), *arguments]
    # variables of a hook name another repository; settings, such as the safe directories, are kept
    inherited = {
        name: setting
        for name, setting in os.environ.items()
        if not name.startswith("GIT_") or "CONFIG" in name
    }
    try:
        completed = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
            env=inherited | environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _GitError(str(error)) from None
    if completed.returncode:
        raise _GitError(
            completed.stderr.strip() or f"git {arguments[0]} ended with {completed.returncode}"
        )
    return completed.stdout.strip()
