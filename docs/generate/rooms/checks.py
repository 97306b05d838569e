"""What is checked after the move, in the new tree; see ``after``."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import move

#: Folders that may hold more than 20 files, and why.
FULL = {"benchmarks/results": "results leave the tree in a commit of their own"}
_FILES = 20
_FIELD = re.compile(r"\w+(, \w+)*:( |$)")  # of a section such as Args
#: Modules whose layer changes its order towards others, and why that may be.
LAYERS = {
    "chaoskit.process.heartbeat_page": "written by workers, read by agents: imports words alone",
    "chaoskit.wire.lease": "used at both ends of the line between agent and coordinator: imports nothing of either",
    "chaoskit.logs.watcher": "runs in the agent and in a harness of commands: imports rules and the wire",
    "chaoskit.logs.process": "as above",
    "chaoskit.wire.coordinator_files": "where a coordinator is found: lies with the connections that ask for it",
}
_BANNED = re.compile(r"(misc|common|part\d+|utils?|helpers?)(\.py)?")


def after(done: Any) -> None:
    """Order imports, format, compare the trees again, and look for what is left of the old names."""
    tree: Path = done.tree
    run(tree, "ruff", "check", "--quiet", "--select", "I001", "--fix", ".")
    run(tree, "ruff", "format", "--quiet", ".")
    done.wrapped = list(wrap_all(tree))
    move.git(tree, "add", "--all")
    done.problems += list(compared(done))
    done.fail("the trees differ after the order of imports")
    done.problems += promises(tree)
    done.problems += left_over(done)
    done.problems += unresolved(tree)
    done.problems += negatives(done)
    done.problems += folders(tree)
    done.problems += links(tree)
    done.problems += jobs(tree)
    move.git(tree, "add", "--all")
    if done.problems and done.options.keep_going:
        print("\n".join(done.problems))
        return
    done.fail("left over")


def wrap_all(tree: Path) -> Iterator[str]:
    """Wrap lines of docstrings that longer names have made longer than 120 columns; nothing but white space changes."""
    words = [tool("ruff"), "check", "--select", "E501", "--output-format", "concise", "."]
    found = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=False).stdout
    for path in sorted({line.split(":")[0] for line in found.splitlines() if ": E501 " in line}):
        file = tree / path
        file.write_text(wrap(file.read_text()))
        yield path


def wrap(text: str) -> str:
    docstrings = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node)
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        if len(line) > 120 and number + 1 in docstrings:
            quotes = line.rstrip().endswith('"""') and '"""' in line
            closing = ""
            if quotes and line.rstrip() != '"""':
                line, closing = line.rstrip()[:-3], '"""'
            indent = re.match(r" *", line)[0]  # type: ignore[index]
            is_field = _FIELD.match(line.strip()) is not None and len(indent) > 4
            rest_indent = indent + ("    " if is_field else "  " if line.lstrip().startswith("* ") else "")
            at = line.rfind(" ", len(indent) + 4, 121)
            if line[:at].count("``") % 2 and (literal := line.rfind(" ``", 0, at)) > len(indent) + 30:
                at = literal  # rather than inside of a command
            head, tail = line[:at], line[at + 1 :]
            following = lines[number + 1] if number + 1 < len(lines) else ""
            deeper = re.match(r" *", following)[0]  # type: ignore[index]
            joins = (
                not closing
                and len(deeper) >= len(indent)
                and re.match(r"[\w`:]", following.strip())
                and not following.strip().endswith('"""')
                and not _FIELD.match(following.strip())
            )
            if joins:
                lines[number : number + 2] = [head, f"{deeper}{tail} {following.strip()}"]
            else:
                lines[number : number + 1] = [head, f"{rest_indent}{tail}", *([indent + closing] if closing else [])]
                docstrings = {each + (1 + bool(closing) if each > number + 1 else 0) for each in docstrings}
                docstrings |= {number + 2, number + 3} if closing else {number + 2}
        number += 1
    return "\n".join(lines) + "\n"


def tool(name: str) -> str:
    """Return the path of a program: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise move.Refused(f"{name} is not installed: run this with the Python of the development environment")
    return found


def run(tree: Path, *command: str) -> None:
    words = [tool(command[0]), *command[1:]]
    done = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-2000:]}")


def compared(done: Any) -> Iterator[str]:
    """The tree of every file again, from the disk."""
    for path, source in done.sources.items():
        text = (done.tree / path).read_text()
        if text != source.new:
            source.wrapped = path in done.wrapped
            done.check_same(source, text)
    yield from ()
    known = set(done.new)
    for path in python_files(done.tree):
        if path not in known:
            yield f"{path}: not made by the move"


def promises(tree: Path) -> Iterator[str]:
    """Write the page of promises anew; it must have the same sentences."""
    page = tree / "docs" / "promises.md"
    before = sentences(page.read_text())
    command = [sys.executable, "tests/tools/promises.py"]
    new = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout
    page.write_text(new)
    if (found := sentences(new)) != before:
        yield f"docs/promises.md: other sentences: {sorted(found ^ before)[:5]}"


def sentences(page: str) -> set[str]:
    """The promises of the page, without the tests, of which some have another folder."""
    return {line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")}


# -- names that are left over ---------------------------------------------------------------------------------------


def left_over(done: Any) -> Iterator[str]:
    moves = done.moves
    accepted = tomllib.loads((move.HERE / "accepted.toml").read_text())["accepted"]
    used: Counter[str] = Counter()
    new_names = {name for name in moves.modules.values()} | moves.packages
    gone = {old for old in moves.modules if "." in old and old not in new_names}
    gone |= {name for path in moves.dropped for name in move.module_names(path)}
    #: a package now, and a module before: only what is below it may be named
    turned = {old for old in moves.modules if old in moves.packages and "." in old}
    new_paths = set(moves.paths.values()) | set(done.new)
    endings = Counter(ending for path in new_paths for ending in [path, *move.endings_of(path)])
    old_paths = {path for path in moves.moved if path not in new_paths and "/" in path}
    old_endings = {ending for path in old_paths for ending in move.endings_of(path) if not endings[ending]}
    old_folders = {str(PurePosixPath(path).parent) for path in moves.files if "/" in path}
    new_folders = {str(parent) for path in new_paths for parent in PurePosixPath(path).parents}
    gone_folders = {folder for folder in old_folders - new_folders if folder != "."}
    gone_folders |= {folder.split("/", 1)[1] for folder in gone_folders if folder.startswith("chaoskit/")}
    old_files = {path.rsplit("/", 1)[-1] for path in moves.moved} - {path.rsplit("/", 1)[-1] for path in new_paths}
    token = re.compile(r"(?<![\w-])(?:\.\./)*([A-Za-z_][\w-]*(?:[./][\w-]+)+/?|[A-Za-z_]\w*/)")
    for path in sorted(new_paths):
        file = done.tree / path
        if not file.is_file() or file.is_symlink() or path.endswith(move.BINARY):
            continue
        try:
            lines = file.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            for match in token.finditer(line):
                word = match[1]
                before = line[max(0, match.start() - 1) : match.start()]
                why = ""
                if "/" in word:
                    bare = word.rstrip("/")
                    if bare in old_paths or (bare in old_endings and before not in ("/",)):
                        why = "a path that is gone"
                    elif bare in gone_folders and (word.endswith("/") or "`" in line):
                        why = "a folder that is gone"
                else:
                    parts = word.split(".")
                    names = [".".join(parts[:count]) for count in range(len(parts), 1, -1)]
                    if before in (".", "/"):
                        continue
                    if any(name in gone for name in names) and not any(name in new_names for name in names[:1]):
                        why = "a module that is gone"
                    elif f"from {word} import" in line:
                        continue  # see `unresolved`
                    elif any(name in turned for name in names) and not any(
                        name in new_names and name not in turned for name in names
                    ):
                        why = "a module that is a package now"
                    elif word in old_files:
                        why = "a file that is gone"
                if why:
                    key = next((f for f in accepted if match_accepted(accepted[f], path, word)), None)
                    if key is None:
                        yield f"{path}:{number}: {word}: {why}: {line.strip()[:140]}"
                    else:
                        used[key] += 1
    for key in accepted:
        if not used[key]:
            yield f"accepted.toml: {key} is not needed"


def match_accepted(entry: dict[str, Any], path: str, word: str) -> bool:
    return bool(re.fullmatch(entry["path"], path)) and bool(re.fullmatch(entry["word"], word))


# -- imports --------------------------------------------------------------------------------------------------------


def python_files(tree: Path) -> list[str]:
    return [path for path in move.git(tree, "ls-files", "*.py").split("\n") if path and not (tree / path).is_symlink()]


def unresolved(tree: Path, only: list[str] | None = None) -> Iterator[str]:
    """Imports of this repository's modules, in files and in texts of code, that lead nowhere."""
    names: dict[str, str] = {}
    for path in python_files(tree):
        for name in move.module_names(path, is_new=True):
            names[name] = path
    folders = {".".join(name.split(".")[:count]) for name in names for count in range(1, name.count(".") + 1)}
    defined: dict[str, set[str]] = {}

    def has(module: str, name: str) -> bool:
        if f"{module}.{name}" in names or f"{module}.{name}" in folders:
            return True
        if module not in names:
            return False
        if module not in defined:
            defined[module] = definitions((tree / names[module]).read_text())
        return name in defined[module] or name.startswith("__") or "__getattr__" in defined[module]

    roots = {"chaoskit", "faults", "support", "simulation", "jobs", "benchmarks", "user_mode_linux", "unit", "cluster", "process", "cli"}
    roots |= {name for name in names if "." not in name}
    for path in only or python_files(tree):
        text = (tree / path).read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in roots:
                if node.module not in names and node.module not in folders:
                    yield f"{path}:{node.lineno}: no module {node.module}"
                    continue
                for alias in node.names:
                    if alias.name != "*" and not has(node.module, alias.name):
                        yield f"{path}:{node.lineno}: {node.module} has no {alias.name}"
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] in ("chaoskit", "faults") and alias.name not in names:
                        yield f"{path}:{node.lineno}: no module {alias.name}"
        for line_number, line in enumerate(text.splitlines(), 1):
            for match in re.finditer(r"(?<![\w.])(chaoskit(?:\.[a-z_]\w*)+)", line):
                parts = match[1].split(".")
                best = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in names or ".".join(parts[:n]) in folders), 0)
                rest = parts[best:]
                module = ".".join(parts[:best])
                if rest and module != "chaoskit" and not has(module, rest[0]) and not re.match(r"[\w.]*\.(toml|yaml|json|md|dev|owner|host|image|backends|substrates|faults)\b", match[1]):
                    yield f"{path}:{line_number}: {match[1]}: {module} has no {rest[0]}"


def definitions(text: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


# -- names that are used as negatives -------------------------------------------------------------------------------


def negatives(done: Any) -> Iterator[str]:
    """Every list of what must not be imported, or is looked at, names what exists, and covers what it covered before."""
    tree: Path = done.tree
    moves = done.moves
    names = {name for path in python_files(tree) for name in move.module_names(path, is_new=True)}

    def covered(prefixes: Any, modules: Any) -> set[str]:
        return {name for name in modules if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)}

    def check(what: str, old: list[str], new: list[str]) -> Iterator[str]:
        for name in new:
            if not covered([name], names) and not name.startswith(("pytest", "_pytest")):
                yield f"{what}: {name} names nothing"
        before = {moves.modules[name] for name in covered(old, moves.modules) if name in moves.modules}
        if lost := before - covered(new, names):
            yield f"{what}: no longer covers {sorted(lost)}"

    old_plain = show(done, "chaoskit/plain.py")
    yield from check("plain.UNDER_TEST", constant(old_plain, "UNDER_TEST"), constant((tree / "chaoskit/plain.py").read_text(), "UNDER_TEST"))
    bounds = moves.paths["tests/test_promised_bounds.py"]
    yield from check("judged", constant(show(done, "tests/test_promised_bounds.py"), "judged"), constant((tree / bounds).read_text(), "judged"))
    cores = moves.paths["tests/mutants.py"]
    dotted = lambda paths: [path.replace("/", ".") for path in paths]  # noqa: E731
    yield from check("CORES", dotted(constant(show(done, "tests/mutants.py"), "CORES")), dotted(constant((tree / cores).read_text(), "CORES")))
    old = {c["id"]: c for c in tomllib.loads(show(done, "pyproject.toml"))["tool"]["importlinter"]["contracts"]}
    new = {c["id"]: c for c in tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]}
    if set(old) != set(new):
        yield f"contracts: {set(old) ^ set(new)}"
    for key, contract in old.items():
        for field in ("forbidden_modules", "source_modules"):
            yield from check(f"contract {key}, {field}", contract.get(field, []), new[key].get(field, []))
        layers = [re.findall(r"[\w.]+", layer) for layer in contract.get("layers", [])]
        found = [re.findall(r"[\w.]+", layer) for layer in new[key].get("layers", [])]
        yield from check(f"contract {key}, layers", sum(layers, []), sum(found, []))
        yield from order(key, layers, found, moves)
    yield from beginnings(tree, names)
    for what, place in (("skips.toml", "tests/skips.toml"), ("conftest._GROUPS", "conftest.py")):
        text = re.sub(r"(?m)^#.*", "", (tree / place).read_text())
        for path in re.findall(r"[\"'](tests/[\w/.]+)", text):
            if not list(tree.glob(path + "*")):
                yield f"{what}: {path} names nothing"


def beginnings(tree: Path, names: set[str]) -> Iterator[str]:
    """Beginnings of module names that code looks for: ``name.startswith("chaoskit.runtime.")``."""
    for path in python_files(tree):
        text = (tree / path).read_text()
        if "startswith(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
                for part in ast.walk(node.args[0]) if node.args else ():
                    word = part.value if isinstance(part, ast.Constant) else None
                    if isinstance(word, str) and re.fullmatch(r"chaoskit(\.\w+)+\.?", word):
                        if not any(name.startswith(word) for name in names):
                            yield f"{path}:{node.lineno}: no module begins with {word}"


def order(key: str, old: list[list[str]], new: list[list[str]], moves: Any) -> Iterator[str]:
    """Each pair of modules that stood on different layers still does, in the same order, or is allowed less."""
    rank_old = {name: level for level, names in enumerate(old) for name in names}
    rank_new = {name: level for level, names in enumerate(new) for name in names}

    def level(name: str, ranks: dict[str, int]) -> int | None:
        parts = name.split(".")
        return next((ranks[".".join(parts[:n])] for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in ranks), None)

    pairs: dict[tuple[int, int], str] = {}
    for before, after in moves.modules.items():
        if before.startswith("chaoskit.") and (a := level(before, rank_old)) is not None:
            b = level(after, rank_new)
            if b is None:
                yield f"contract {key}: {after} has no layer, {before} had one"
            else:
                pairs.setdefault((a, b), after)
    for (a, b), one in pairs.items():
        for (c, d), other in pairs.items():
            if a < c and b > d and one not in LAYERS and other not in LAYERS:
                yield f"contract {key}: {one} was above {other}, and is below"


def show(done: Any, path: str) -> str:
    return move.git(done.tree, "show", f"HEAD:{path}")


def constant(text: str, name: str) -> list[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            return list(ast.literal_eval(node.value))
    raise move.Refused(f"no {name}")


# -- folders and links ------------------------------------------------------------------------------------------------


def folders(tree: Path) -> Iterator[str]:
    counts = Counter(str(PurePosixPath(path).parent) for path in move.git(tree, "ls-files").splitlines())
    for folder, count in sorted(counts.items()):
        if count > _FILES and folder not in FULL:
            yield f"{folder}: {count} files"
    for path in move.git(tree, "ls-files").splitlines():
        if any(_BANNED.fullmatch(part) for part in PurePosixPath(path).parts):
            yield f"{path}: a name that says nothing"


def jobs(tree: Path) -> Iterator[str]:
    """Paths of jobs from the folder of a test."""
    for path in python_files(tree):
        if path.startswith("tests/") and not path.startswith(("tests/jobs/", "tests/support/")):
            for target in re.findall(r"[\"']((?:\.\./)*jobs/\w+/\w+\.py)", (tree / path).read_text()):
                if not (tree / path).parent.joinpath(target).exists():
                    yield f"{path}: there is no job {target}"
            for target in re.findall(r"[\"'](jobs/\w+\.py)", (tree / path).read_text()):
                if target.split("/")[1] in {each.name for each in (tree / "tests/jobs").rglob("*.py")}:
                    yield f"{path}: the job {target} lies in a folder"


def links(tree: Path) -> Iterator[str]:
    """Links between pages, and to files."""
    for path in move.git(tree, "ls-files", "*.md").splitlines():
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (tree / path).read_text()):
            if "://" not in target and "{" not in target and not target.startswith("mailto:") and not (tree / path).parent.joinpath(target).exists():
                yield f"{path}: a link to {target} leads nowhere"
