"""The job of a run: how it is found, and what can be checked of its source without running it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import BadInput


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which ``train(trainer, **options)`` to run.

    Args:
        path: Python file that defines the function.
        function: its name.
        module: dotted name under which the file is imported, or "" to load it by path.
        options: keyword arguments of the function; plain JSON values.
        sharded: the job shards its state over ranks: it calls ``trainer.mesh``.
    """

    path: str
    function: str = "train"
    module: str = ""
    options: dict[str, Any] = {}
    sharded: bool = False

    @property
    def name(self) -> str:
        return Path(self.path).stem if self.function == "train" else f"{Path(self.path).stem}:{self.function}"


def resolve_job(target: str, options: dict[str, Any] | None = None) -> JobSpec:
    """Find a job by name (``gpt``), file (``train.py``) or file and function (``jobs.py:train_small``).

    Raises:
        BadInput: if there is no such job, or it cannot be one.
    """
    path, colon, function = target.partition(":")
    if colon and not function:
        raise BadInput("job", target, "name a function behind the colon, or leave the colon out")
    if not path.endswith(".py"):
        module = f"chaoskit.fixtures.jobs.{path}"
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        if found is None or found.origin is None:
            raise BadInput("job", target, "name a reference job such as 'gpt', or a file such as 'train.py'")
        job = JobSpec(found.origin, function or "train", module, options or {})
    else:
        if not Path(path).is_file():
            raise BadInput("job", target, "name a Python file that exists")
        job = JobSpec(str(Path(path).resolve()), function or "train", "", options or {})
    return msgspec.structs.replace(job, sharded=validate_job(job))


def validate_job(job: JobSpec) -> bool:
    """Check the source of a job. Returns whether it shards its state: it calls ``trainer.mesh``."""
    try:
        tree = ast.parse(Path(job.path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("job", job.path, f"name a Python file that can be read ({error})") from None
    except SyntaxError as error:
        raise BadInput("job", job.path, f"mend the syntax error in line {error.lineno}: {error.msg}") from None
    train = _function(tree, job)
    names = [argument.arg for argument in (*train.args.posonlyargs, *train.args.args)]
    if not names:
        raise BadInput("job", job.path, f"let {job.function} take the trainer as its first argument")
    if not _has_loss(tree, names[0]):
        raise BadInput("job", job.path, "call step.backward(loss) inside `with trainer.transaction() as step`: no loss")
    known = {*names[1:], *(argument.arg for argument in train.args.kwonlyargs)}
    unknown = sorted(set(job.options) - known)
    if unknown and train.args.kwarg is None:
        raise BadInput("options", unknown[0], f"{job.function} takes {', '.join(sorted(known)) or 'no options'}")
    _validate_options(train, job.options)
    try:
        msgspec.json.encode(job.options)
    except (TypeError, ValueError) as error:
        raise BadInput("options", job.options, f"use plain JSON values: {error}") from None
    return any(_calls(function, "mesh") for function in _reached(train, tree))


def _function(tree: ast.Module, job: JobSpec) -> ast.FunctionDef:
    """The train function: of the module itself, as methods of classes may have its name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == job.function:
            return node
        if isinstance(node, ast.AsyncFunctionDef) and node.name == job.function:
            raise BadInput("job", job.path, f"define {job.function} without async: it is called, not awaited")
    raise BadInput("job", job.path, f"define a function {job.function}(trainer, ...) in it")


def _reached(train: ast.FunctionDef, tree: ast.Module) -> list[ast.FunctionDef]:
    """The train function, and those of its file that it calls, at any depth."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found, names = [train], {train.name}
    for function in found:
        called = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} & functions.keys() - names
        names |= called
        found += [functions[name] for name in called]
    return found


def _calls(function: ast.FunctionDef, method: str) -> bool:
    """Whether a function calls this method of one of its arguments."""
    arguments = {one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in arguments
        for node in ast.walk(function)
    )


_PLAIN_TYPES: dict[str, set[type]] = {
    "int": {int},
    "float": {int, float},
    "str": {str},
    "bool": {bool},
    "None": {type(None)},
}


def _validate_options(train: ast.FunctionDef, options: dict[str, Any]) -> None:
    """Refuse a missing option, and one that contradicts a plain annotation: every rank would fail on it."""
    positional = [*train.args.posonlyargs, *train.args.args]
    optional = len(train.args.defaults)
    required = positional[1 : len(positional) - optional] if optional else positional[1:]
    required += [one for one, default in zip(train.args.kwonlyargs, train.args.kw_defaults, strict=True) if not default]
    for argument in required:
        if argument.arg not in options:
            remedy = f"give this option a value (--set {argument.arg}=VALUE): {train.name} has no default for it"
            raise BadInput(f"options.{argument.arg}", None, remedy)
    for argument in (*positional, *train.args.kwonlyargs):
        annotation = ast.unparse(argument.annotation) if argument.annotation else ""
        names = [name.strip() for name in annotation.split("|")]
        if argument.arg in options and set(names) <= set(_PLAIN_TYPES):
            value = options[argument.arg]
            if not any(type(value) in _PLAIN_TYPES[name] for name in names):
                raise BadInput(f"options.{argument.arg}", value, f"use a value of type {annotation}")
    for name, default in _numbers_by_default(train).items():
        if isinstance(options.get(name), str):
            raise BadInput(f"options.{name}", options[name], f"use a number, as its default {default} is one")


def _numbers_by_default(train: ast.FunctionDef) -> dict[str, int | float]:
    """The parameters without an annotation whose default is a number."""
    positional = [*train.args.posonlyargs, *train.args.args]
    optional = positional[len(positional) - len(train.args.defaults) :]
    pairs = [*zip(optional, train.args.defaults, strict=True)]
    pairs += [(one, value) for one, value in zip(train.args.kwonlyargs, train.args.kw_defaults, strict=True) if value]
    found: dict[str, int | float] = {}
    for argument, default in pairs:
        value = default.value if isinstance(default, ast.Constant) else None
        if argument.annotation is None and isinstance(value, int | float) and not isinstance(value, bool):
            found[argument.arg] = value
    return found


def _has_loss(tree: ast.Module, trainer: str) -> bool:
    """Whether the file calls ``.backward``, or hands its trainer to code elsewhere that may."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            return True
        if any(isinstance(argument, ast.Name) and argument.id == trainer for argument in node.args):
            return True
    return False
