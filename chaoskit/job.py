"""The job of a run: its lookup, and checks of its source that do not run it.

-> ``runtime/worker/process.py`` imports and calls it. ``config.py``: the other settings of a run.
``substrate/supervisor/sources.py``: how its files reach other machines.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections import Counter
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from chaoskit.errors import BadInput, closest_name, name_remedy
from chaoskit.typed import require_short_names, typed_arguments

#: Folders in which installed packages lie.
_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
#: Package of the reference jobs, such as ``gpt``.
_REFERENCE_JOBS = "chaoskit.fixtures.jobs."
#: Attribute of a module that was loaded as a job, with the job's path.
_JOB_ATTRIBUTE = "__chaoskit_job__"
_OPTION_LENGTH_MAX = 40  # where a message shows it in a signature


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function ``train(trainer, **options)`` that a run calls.

    Args:
        path: Python file that defines the function.
        function: name of the function.
        module: dotted name under which the file is imported, or "" to load it by path.
        options: keyword arguments of the function; plain JSON values.
        sharded: the job shards its state over ranks: its source calls ``trainer.mesh``, as
            :func:`validate_job` finds.
        root: folder in which ``module`` is found, or "" if the module is installed.
    """

    path: str
    function: str = "train"
    module: str = ""
    options: dict[str, Any] = {}
    sharded: bool = False
    root: str = ""

    @property
    def name(self) -> str:
        """The short name of the job, without its folder, for reports."""
        name = self.module if self.root else Path(self.path).stem
        return name if self.function == "train" else f"{name}:{self.function}"

    @property
    def folder(self) -> Path:
        """The folder from which the job imports its own modules."""
        return Path(self.root) if self.root else Path(self.path).parent

    @property
    def is_installed(self) -> bool:
        """True if the job is imported from an installed package, such as a reference job."""
        return bool(self.module) and not self.root

    def moved_to(self, folder: Path) -> JobSpec:
        """Return the same job after the content of its folder was moved to ``folder``."""
        path = folder / Path(self.path).relative_to(self.folder)
        return msgspec.structs.replace(self, path=str(path), root=str(folder) if self.root else "")

    @property
    def target(self) -> str:
        """The argument with which :func:`resolve_job` finds this job from any directory."""
        target = self.module.removeprefix(_REFERENCE_JOBS) or self.path
        if self.root:
            target = f"{self.root}/{target}"
        return target if self.function == "train" else f"{target}:{self.function}"

    def sources(self) -> list[Path]:
        """Return the Python files that the job may import: its folder's, or all of its package."""
        if self.root and "." in self.module:
            return sorted((self.folder / self.module.partition(".")[0]).rglob("*.py"))
        return sorted(Path(self.path).parent.glob("*.py"))


@typed_arguments
def resolve_job(target: str, options: dict[str, Any] | None = None) -> JobSpec:
    """Find a job by name (``gpt``), file (``train.py``) or module (``package.train``).

    Another function than ``train`` follows a colon (``jobs.py:train_small``). A module is searched
    for as by ``python -m``, in the working directory first; ``folder/package.train`` is searched
    for in ``folder`` only. No code of the job is run.

    Raises:
        BadInput: if there is no such job, or the file cannot be a job.
    """
    require_short_names("job", target)
    path, colon, function = target.partition(":")
    if colon and not function:
        raise BadInput("job", target, "name a function behind the colon, or leave the colon out")
    if not path.endswith(".py"):
        job = _reference_job(path) or _module_job(path)
        if job is None:
            remedy = "name a reference job such as 'gpt', or a file such as 'train.py'"
            raise BadInput(
                "job", target, name_remedy(path, [*reference_jobs(), *_modules(Path())], remedy)
            )
    else:
        if not Path(path).is_file():
            closest = closest_name(Path(path).name, _scripts(Path(path).parent))
            remedy = (
                f"write {Path(path).with_name(closest)}"
                if closest
                else "name a Python file that exists"
            )
            raise BadInput("job", target, remedy)
        job = JobSpec(str(Path(path).resolve()))
    job = msgspec.structs.replace(job, function=function or "train", options=options or {})
    return msgspec.structs.replace(job, sharded=validate_job(job))


def recall_job(target: str, options: dict[str, Any], *, sharded: bool) -> JobSpec:
    """Return the job with this :attr:`JobSpec.target`, without a lookup: its file may be gone.

    The path of a module is the module's name.
    """
    path, _, function = target.partition(":")
    root, _, module = path.rpartition("/")
    if path.endswith(".py"):
        root = module = ""
    elif not root and "." not in module:
        module = f"{_REFERENCE_JOBS}{module}"
    return JobSpec(path, function or "train", module, options, sharded, root)


def reference_jobs() -> list[str]:
    """Return the names of the reference jobs: the modules of their package that define ``train``.

    The list is empty if the package is not installed.
    """
    spec = importlib.util.find_spec(_REFERENCE_JOBS.rstrip("."))
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.py"))
    return [file.stem for file in files if "\ndef train(" in file.read_text(encoding="utf-8")]


def _modules(folder: Path) -> list[str]:
    """Return the names under which the Python files of a folder are imported."""
    return sorted(file.stem for file in folder.glob("*.py"))


def _scripts(folder: Path) -> list[str]:
    """Return the names of the Python files of a folder."""
    return sorted(file.name for file in folder.glob("*.py") if file.is_file())


def _reference_job(name: str) -> JobSpec | None:
    """Return the reference job of that name, or None if there is none."""
    module = f"{_REFERENCE_JOBS}{name}"
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return (
        JobSpec(spec.origin, module=module)
        if spec is not None and spec.origin is not None
        else None
    )


def _module_job(target: str) -> JobSpec | None:
    """Return the job in a module of the user, ``package.module`` or ``folder/package.module``.

    Return None if no folder of the search path has such a module.
    """
    folder, slash, module = target.rpartition("/")
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    folders = [folder or "/"] if slash else ["", *sys.path, *_parents_of_package(parts[0])]
    for root in dict.fromkeys(Path(folder_name).resolve() for folder_name in folders):
        if (located := _module_file(root, parts)) is not None:
            path, module = located
            is_installed = not _INSTALLED_FOLDERS.isdisjoint(path.parts)
            return JobSpec(str(path), module=module, root="" if is_installed else str(root))
    return None


def _module_file(root: Path, parts: list[str]) -> tuple[Path, str] | None:
    """Return the file of a module below ``root`` and its full name, or None if there is none.

    A package stands for its ``__main__``, if it has one.
    """
    path, module = root.joinpath(*parts), ".".join(parts)
    if (path / "__main__.py").is_file():
        return path / "__main__.py", f"{module}.__main__"
    if (path / "__init__.py").is_file():
        return path / "__init__.py", module
    file = path.with_name(f"{parts[-1]}.py")
    return (file, module) if file.is_file() else None


def _parents_of_package(name: str) -> list[str]:
    """Return the folders of a package that an import hook finds, such as an editable install.

    The list is empty if no hook finds it.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [str(Path(place).parent) for place in (spec and spec.submodule_search_locations) or ()]


def import_job(job: JobSpec) -> ModuleType:
    """Import and return the module of a job.

    The search path is that of ``python FILE`` or ``python -m MODULE``. Processes that the job
    starts, such as the workers of a ``DataLoader``, can import the module by its name.

    Raises:
        BadInput: if a package of chaoskit or of its dependencies has taken the name of the job's
            module. Errors that the module raises are raised as they are.
    """
    if not job.module or job.root:
        folder = str(job.folder)
        if sys.path[:1] != [folder]:
            sys.path.insert(0, folder)
    if job.module:
        module = importlib.import_module(job.module)
        if job.root and Path(module.__file__ or "").resolve() != Path(job.path).resolve():
            raise BadInput(
                "job", job.target, f"rename it: {module.__file__} has the name {job.module}, too"
            )
        return module
    return _import_file(Path(job.path))


def _import_file(path: Path) -> ModuleType:
    """Run a Python file as a module and return it, or the module that was made of it before."""
    loaded = [
        module
        for module in sys.modules.values()
        if getattr(module, _JOB_ATTRIBUTE, "") == str(path)
    ]
    if loaded:
        return loaded[0]
    name = path.stem if _is_found_by_name(path) else f"chaoskit_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    setattr(module, _JOB_ATTRIBUTE, str(path))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_found_by_name(path: Path) -> bool:
    """Return whether ``import STEM`` finds this file, once its folder is the first on the path."""
    name = path.stem
    if "." in name or name in sys.modules or name in sys.builtin_module_names:
        return False
    spec = PathFinder.find_spec(name, [str(path.parent)])
    return spec is not None and spec.origin is not None and Path(spec.origin) == path


def validate_job(job: JobSpec) -> bool:
    """Check the source of a job. Return whether it shards its state: it calls ``trainer.mesh``.

    The call counts in the train function, and in functions of the same file that it calls by name.

    Raises:
        BadInput: if the source cannot be read, has no train function with a loss, or does not take
            these options.
    """
    try:
        tree = ast.parse(Path(job.path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("job", job.path, f"name a Python file that can be read ({error})") from None
    except SyntaxError as error:
        raise BadInput(
            "job", job.path, f"correct the syntax error in line {error.lineno}: {error.msg}"
        ) from None
    train = _function(tree, job)
    names = [argument.arg for argument in (*train.args.posonlyargs, *train.args.args)]
    if not names:
        raise BadInput(
            "job", job.path, f"let {job.function} take the trainer as its first argument"
        )
    if not _has_loss(tree, names[0]):
        raise BadInput(
            "job",
            job.path,
            "call step.backward(loss) inside `with trainer.transaction() as step`: "
            "no code of this file does",
        )
    _require_known_options(train, job)
    _validate_options(train, job.options)
    try:
        msgspec.json.encode(job.options)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput("options", job.options, f"use plain JSON values: {error}") from None
    return any(_calls(function, "mesh") for function in _called_functions(train, tree))


def _function(tree: ast.Module, job: JobSpec) -> ast.FunctionDef:
    """Return the train function at the top level of the module: methods may have its name, too.

    Raises:
        BadInput: if there is none, or it is async.
    """
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == job.function:
            return node
        if isinstance(node, ast.AsyncFunctionDef) and node.name == job.function:
            raise BadInput(
                "job", job.path, f"define {job.function} without async: it is called, not awaited"
            )
    closest = closest_name(
        job.function, [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    )
    remedy = f"define a function {job.function}(trainer, ...) in it"
    raise BadInput("job", job.path, f"write {closest}: {remedy}" if closest else remedy)


def _called_functions(train: ast.FunctionDef, tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the train function and the functions of its file that it calls, at any depth."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    reached, names = [train], {train.name}
    for function in reached:
        called = {
            node.id for node in ast.walk(function) if isinstance(node, ast.Name)
        } & functions.keys() - names
        names |= called
        reached += [functions[name] for name in called]
    return reached


def _calls(function: ast.FunctionDef, method: str) -> bool:
    """Return whether a function calls this method of one of its arguments."""
    arguments = {
        argument.arg
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    }
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


def _require_known_options(train: ast.FunctionDef, job: JobSpec) -> None:
    """Raise BadInput, with both remedies, for an option that the train function does not take."""
    positional = [argument.arg for argument in (*train.args.posonlyargs, *train.args.args)]
    parameters = {*positional[1:], *(argument.arg for argument in train.args.kwonlyargs)}
    unknown = sorted(set(job.options) - parameters)
    if not unknown or train.args.kwarg is not None:
        return
    name = unknown[0]
    remedy = f"{train.name} takes {', '.join(sorted(parameters)) or 'no options'}: leave {name} out"
    if closest := closest_name(name, parameters):
        remedy = f"write {closest}; {remedy}"
    if not job.is_installed and name.isidentifier() and name != positional[0]:
        option = repr(job.options[name])
        option = option if len(option) <= _OPTION_LENGTH_MAX else "..."
        signature = f"def {train.name}({positional[0]}, {name}={option})"
        remedy += f", or give {train.name} the parameter, as in {signature}"
    raise BadInput(f"options.{name}", job.options[name], remedy)


def _validate_options(train: ast.FunctionDef, options: dict[str, Any]) -> None:
    """Raise BadInput for a missing option, or one that contradicts a plain annotation.

    Every rank would fail on it.
    """
    positional = [*train.args.posonlyargs, *train.args.args]
    optional = len(train.args.defaults)
    required = positional[1 : len(positional) - optional] if optional else positional[1:]
    required += [
        argument
        for argument, default in zip(train.args.kwonlyargs, train.args.kw_defaults, strict=True)
        if not default
    ]
    for argument in required:
        if argument.arg not in options:
            name = argument.arg
            remedy = f"give this option a value (--set {name}=VALUE; in Python options={{{name!r}: VALUE}})"
            raise BadInput(
                f"options.{name}", None, f"{remedy}, or a default in def {train.name}(...)"
            )
    for argument in (*positional, *train.args.kwonlyargs):
        annotation = ast.unparse(argument.annotation) if argument.annotation else ""
        names = [name.strip() for name in annotation.split("|")]
        if argument.arg in options and set(names) <= set(_PLAIN_TYPES):
            option = options[argument.arg]
            if not any(type(option) in _PLAIN_TYPES[name] for name in names):
                raise BadInput(
                    f"options.{argument.arg}", option, f"use a value of type {annotation}"
                )
    for name, default in _numbers_by_default(train).items():
        if isinstance(options.get(name), str):
            raise BadInput(
                f"options.{name}", options[name], f"use a number, as its default {default} is one"
            )


def _numbers_by_default(train: ast.FunctionDef) -> dict[str, int | float]:
    """Return the default of each parameter that has no annotation and a number as its default."""
    defaults: dict[str, int | float] = {}
    for argument, default in _defaults(train):
        number = default.value if isinstance(default, ast.Constant) else None
        if (
            argument.annotation is None
            and isinstance(number, int | float)
            and not isinstance(number, bool)
        ):
            defaults[argument.arg] = number
    return defaults


def _has_loss(tree: ast.Module, trainer: str) -> bool:
    """Return whether the file calls ``.backward``, or passes its trainer to code that may."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            return True
        if any(isinstance(argument, ast.Name) and argument.id == trainer for argument in node.args):
            return True
    return False


def stated_batches(job: JobSpec) -> list[int]:
    """Return the global batch sizes in the source of a job: numbers, options, constants.

    Computed sizes are left out, as they are known only when the job runs. The job must be valid.
    """
    tree = ast.parse(Path(job.path).read_text(encoding="utf-8"))
    train = _function(tree, job)
    constants = _constants(tree)
    defaults = {
        argument.arg: default.value
        for argument, default in _defaults(train)
        if isinstance(default, ast.Constant)
    }
    values = defaults | job.options
    batches = []
    for function in _called_functions(train, tree):
        local = values if function is train else {}
        parameters = {
            node.arg for node in ast.walk(function) if isinstance(node, ast.arg)
        } - local.keys()
        assigned = {*_assigned_names(function), *parameters}
        for expression in _batch_sizes(function):
            match expression:
                case ast.Constant(value=constant):
                    batches.append(constant)
                case ast.Name(id=name) if name not in assigned:
                    batches.append(local.get(name, getattr(constants.get(name), "value", None)))
                case ast.Attribute(attr=name) if (
                    "SIZES" in constants
                ):  # of the size that a reference job has chosen
                    batches.append(
                        job.options.get(name)
                        or _batch_of_size(constants.get("SIZES"), name, values)
                    )
    return [batch for batch in batches if type(batch) is int]


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values of module-level names that are assigned once in the whole file."""
    stored = Counter(_assigned_names(tree))
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and stored[target.id] == 1
    }


def _assigned_names(tree: ast.AST) -> list[str]:
    """Return the names that code assigns to, once for each assignment."""
    return [
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def _batch_sizes(function: ast.FunctionDef) -> list[ast.expr]:
    """Return the arguments ``batch_size`` of calls of ``step.shards``."""
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    shards = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "shards"
    ]
    return [
        keyword.value for call in shards for keyword in call.keywords if keyword.arg == "batch_size"
    ]


def _defaults(train: ast.FunctionDef) -> list[tuple[ast.arg, ast.expr]]:
    """Return the parameters that have a default, each with its default."""
    positional = [*train.args.posonlyargs, *train.args.args]
    optional = positional[len(positional) - len(train.args.defaults) :]
    named = zip(train.args.kwonlyargs, train.args.kw_defaults, strict=True)
    return [
        *zip(optional, train.args.defaults, strict=True),
        *((argument, default) for argument, default in named if default),
    ]


def _batch_of_size(sizes: ast.expr | None, field: str, values: dict[str, Any]) -> Any:
    """Return a field of the entry of ``SIZES`` that the option ``size`` names; None if it has none.

    Reference jobs have such a constant.
    """
    if not isinstance(sizes, ast.Dict):
        return None
    for key, fields in zip(sizes.keys, sizes.values, strict=True):
        if (
            isinstance(key, ast.Constant)
            and key.value == values.get("size")
            and isinstance(fields, ast.Call)
        ):
            named = {
                keyword.arg: getattr(keyword.value, "value", None) for keyword in fields.keywords
            }
            return named.get(field)
    return None
