#!/usr/bin/env python3
"""Move the modules of chaoskit into rooms: ``move.py TREE``, on a clean checkout.

The script reads ``map.toml`` (which file goes where), ``edits.toml`` (source text that names a place in another form
than a module or a path, each reviewed) and ``file_paths.toml`` (paths that begin at ``__file__``, each reviewed), all
beside it. It renames with ``git mv``, rewrites imports, module names and paths, and refuses any other change: the
syntax tree of every file without its imports is the same before and after, once names are mapped.

Options:
    --dry-run        make no change; report problems that can be seen without one
    --propose-paths  print the entries of file_paths.toml that this tree needs
    --keep-going     report problems of the tree as it is, instead of ending at the first kind

It commits nothing. Exit status 0: moved and checked. 1: the tree is not what the map says, or a check failed.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

HERE = Path(__file__).resolve().parent
#: Folders of which every file must stand in the map.
MAPPED = ("chaoskit", "faults", "suites", "fixtures", "tests", "benchmarks")
#: Suffixes of files that hold no text to rewrite.
BINARY = (".svg", ".png", ".jsonl", ".csv")
#: Files of which the old text is history, and is not rewritten: none may say where something is today.
HISTORY: tuple[str, ...] = ()


_SUFFIXES = ("md", "j2", "html", "css", "toml", "json", "py")


class Refused(Exception):
    """The tree is not what the map says, or a check failed."""


# -- the map ------------------------------------------------------------------------------------------------------


class Moves:
    """What ``map.toml`` says: old path -> new path, and what follows from it."""

    def __init__(self, files: set[str]) -> None:
        self.files = files
        self.paths: dict[str, str] = {}
        self.docs: dict[str, str] = {}  # new package -> docstring
        read = tomllib.loads((HERE / "map.toml").read_text())
        self.dropped: dict[str, str] = read.pop("dropped", {})
        for folder, entries in read.items():
            for source, names in entries.items():
                if source == "doc":
                    self.docs[folder] = names
                    continue
                for name in names:
                    old, _, new = (part.strip() for part in name.partition(">"))
                    old, new = (f"{each}.py" if each and "." not in each else each for each in (old, new))
                    path = f"{source}/{old}"
                    if path in self.paths:
                        raise Refused(f"map.toml: {path} stands there twice")
                    self.paths[path] = f"{folder}/{new or old}"
        places = defaultdict(list)
        for old, new in self.paths.items():
            places[new].append(old)
        if twice := {new: old for new, old in places.items() if len(old) > 1}:
            raise Refused(f"map.toml: two files come to one place: {twice}")
        self._check(files)
        for path in files:
            self.paths.setdefault(path, path)
        for path in self.dropped:
            self.paths.pop(path, None)
        self.moved = {old: new for old, new in self.paths.items() if old != new}
        self.modules = self._modules()
        self.packages = self._packages()

    def _check(self, files: set[str]) -> None:
        known = {*self.paths, *self.dropped}
        unknown = sorted(
            path for path in files - known if path.split("/")[0] in MAPPED and path != "chaoskit/faults"
        )
        gone = sorted(known - files)
        problems = [f"not in the map: {path}" for path in unknown]
        problems += [f"in the map, but not in the tree: {path}" for path in gone]
        for path in self.dropped:
            pass
        if problems:
            raise Refused("\n".join(problems))

    def _modules(self) -> dict[str, str]:
        """Old module name -> new module name, under every name by which a module is imported."""
        names: dict[str, str] = {}
        for old, new in self.paths.items():
            if old.endswith(".py"):
                for before, after in zip(module_names(old), module_names(new, is_new=True), strict=True):
                    names[before] = after
        return names

    def _packages(self) -> set[str]:
        """Module names of new packages without an ``__init__`` in the old tree."""
        return {name for folder in self.docs for name in module_names(f"{folder}/__init__.py")}

    def new_folder_docs(self) -> dict[str, str]:
        return self.docs


def module_names(path: str, *, is_new: bool = False) -> list[str]:
    """Return the names by which the module of a file is imported, the same number for the same top folder.

    Benchmarks were scripts of one folder that import each other by bare names; now they are run from the top of the
    tree, as ``python -m benchmarks.room.name``.
    """
    parts = list(PurePosixPath(path).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    name = ".".join(parts)
    match parts[0]:
        case "faults":
            return [name, f"chaoskit.{name}"]
        case "suites" | "fixtures":
            return [f"chaoskit.{name}", name]
        case "tests":
            rest = parts[1:]
            if rest[:1] == ["tools"] and len(rest) == 2:  # tests/tools is on the path, as its scripts are run by path
                rest = rest[1:]
            return [".".join(rest) or "tests", name]
        case "benchmarks":
            return [name if is_new else ".".join(parts[1:]) or "benchmarks", name]
        case _:
            return [name]


# -- names in texts -----------------------------------------------------------------------------------------------


class Texts:
    """Maps module names and paths in texts: strings, comments, documentation, settings."""

    def __init__(self, moves: Moves) -> None:
        self.moves = moves
        self._by_name = {old: new for old, new in moves.modules.items() if old != new and "." in old}
        # a bare name is a word: modules on the path of tests and benchmarks are mapped in imports only
        self._by_path: dict[str, str] = {}
        endings = Counter(ending for old in moves.files for ending in endings_of(old))
        for old, new in moves.moved.items():
            if "/" not in old:
                continue
            self._by_path[old] = new
            for ending in endings_of(old):
                if endings[ending] == 1:  # a place is often named from within its package
                    begin = old.removesuffix(ending)
                    short = new.removeprefix(begin) if new.startswith(begin) else new.split("/", 1)[1]
                    self._by_path.setdefault(ending, short)
        self._by_file: dict[str, str] = {}  # bare names of files, where they are unique and change
        counts = defaultdict(list)
        for old in moves.files:
            counts[old.rsplit("/", 1)[-1]].append(old)
        for old, new in moves.moved.items():
            before, after = old.rsplit("/", 1)[-1], new.rsplit("/", 1)[-1]
            if before != after and len(counts[before]) == 1:
                self._by_file[before] = "/".join(new.split("/")[-2:])
        self._pattern = re.compile(
            r"(?P<import>\bfrom (?P<module>[a-z_][\w.]*) import (?P<names>\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*))"
            r"|(?P<bench>python benchmarks/(?P<script>\w+)\.py\b)"
            r"|(?<![\w-])(?P<token>[A-Za-z_][\w-]*(?:[./][\w-]+)+)"
        )

    def map(self, text: str) -> str:
        return self._pattern.sub(self._new, text)

    def _new(self, match: re.Match[str]) -> str:
        if match["import"]:
            return self._imported(match["import"], match["module"], match["names"])
        if match["bench"]:
            new = self.moves.paths.get(f"benchmarks/{match['script']}.py")
            return match["bench"] if new is None else f"python -m {module_names(new, is_new=True)[0]}"
        token, before = match["token"], match.string[max(0, match.start() - 2) : match.start()]
        if "/" in token:
            if before[-1:] == "/" and before[:1].isalnum():
                return token
            return self._by_path.get(token, token)
        if before[-1:] in (".", "/"):
            return token
        if token in self._by_file:
            return self._by_file[token]
        parts = token.split(".")
        for count in range(len(parts), 1, -1):
            if (new := self._by_name.get(".".join(parts[:count]))) is not None:
                is_file = count < len(parts) and parts[count] in _SUFFIXES
                return token if is_file else ".".join([new, *parts[count:]])
        return token

    def _imported(self, whole: str, module: str, names: str) -> str:
        """An import inside a text, such as code that a test writes to a file."""
        aliases = [ast.alias(*part.split(" as ")) if " as " in part else ast.alias(part) for part in names.split(", ")]
        groups = regroup(self.moves, module, aliases, None)  # what uses the names is text, too
        if groups is None:
            return whole
        return "; ".join(show_import(target, new) for target, new in groups)

    def left_over(self) -> re.Pattern[str]:
        """Pattern of what must not be anywhere any more."""
        return self._pattern


def endings_of(path: str) -> list[str]:
    """Return the path without its first folders, as long as one folder is left: ``a/b/c.py`` as ``b/c.py``."""
    parts = path.split("/")
    return ["/".join(parts[count:]) for count in range(1, len(parts) - 1)]


def regroup(
    moves: Moves, module: str, names: list[ast.alias], taken: frozenset[str] | None
) -> list[tuple[str, list[ast.alias]]] | None:
    """Return the imports that replace ``from module import names``, or None where nothing changes.

    Args:
        taken: names of the file that a renamed module must not take; None: it keeps its name by ``as``.
    """
    groups: dict[str, list[ast.alias]] = {}
    changed = False
    for alias in names:
        full = f"{module}.{alias.name}"
        if full in moves.modules and is_submodule(moves, module, alias.name):
            target, _, leaf = moves.modules[full].rpartition(".")
            bound = alias.asname
            if bound is None and leaf != alias.name and (taken is None or leaf in taken):
                bound = alias.name
            if bound == leaf:
                bound = None
            new = ast.alias(leaf, bound) if bound else ast.alias(leaf)
        else:
            target = moves.modules.get(module, module)
            new = alias
        changed |= target != module or ast.dump(new) != ast.dump(alias)
        groups.setdefault(target, []).append(new)
    return list(groups.items()) if changed else None


def is_submodule(moves: Moves, package: str, name: str) -> bool:
    return f"{package}.{name}" in moves.modules


def show_import(module: str, names: Iterable[ast.alias]) -> str:
    shown = ", ".join(f"{alias.name} as {alias.asname}" if alias.asname else alias.name for alias in names)
    return f"from {module} import {shown}"


# -- one Python file ----------------------------------------------------------------------------------------------


class Source:
    """A Python file: its old text with the reviewed edits made, and its new text."""

    def __init__(self, path: str, new_path: str, text: str, moves: Moves, texts: Texts) -> None:
        self.path, self.new_path, self.moves, self.texts = path, new_path, moves, texts
        self.old = text
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.plain_imports = {
            alias.asname or alias.name.split(".")[0]
            for node in self.nodes
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        self.wrapped = False
        self.renamed: dict[str, str] = {}  # names of imported modules in this file
        self.kept: list[str] = []  # modules that keep their old name in this file by `as`
        self.imports = self._imports()
        self.new = self._rewritten()

    # what is replaced, as (begin, end, text) of the source

    def _imports(self) -> dict[ast.stmt, list[tuple[str, list[ast.alias]]] | None]:
        found: dict[ast.stmt, Any] = {}
        used = {
            getattr(node, field)
            for node in self.nodes
            for field in ("id", "arg", "name")
            if isinstance(getattr(node, field, None), str) and not isinstance(node, ast.alias)
        }
        used |= {
            alias.asname or alias.name.split(".")[0]
            for node in self.nodes
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                groups = regroup(self.moves, node.module, node.names, frozenset(used))
                if groups:
                    found[node] = groups
                    self._note_renames(node, groups)
        return found

    def _note_renames(self, node: ast.ImportFrom, groups: list[tuple[str, list[ast.alias]]]) -> None:
        new_names = {f"{target}.{alias.name}": alias.asname or alias.name for target, names in groups for alias in names}
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            if full in self.moves.modules and alias.asname is None:
                bound = new_names[self.moves.modules[full]]
                if bound != alias.name:
                    if self.renamed.setdefault(alias.name, bound) != bound:
                        raise Refused(f"{self.path}: {alias.name} would get two names")
                elif self.moves.modules[full].rpartition(".")[2] != alias.name:
                    self.kept.append(f"{self.moves.modules[full]} as {alias.name}")

    def _rewritten(self) -> str:
        lines = self.old.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        encoded = [line.encode() for line in lines]

        def place(line: int, column: int) -> int:  # column in bytes
            return starts[line - 1] + len(encoded[line - 1][:column].decode())

        changes: list[tuple[int, int, str]] = []
        in_imports: list[tuple[int, int]] = []
        for node in self.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                begin = place(node.lineno, node.col_offset)
                end = place(node.end_lineno or 0, node.end_col_offset or 0)
                in_imports.append((begin, end))
                if isinstance(node, ast.ImportFrom) and self.imports.get(node):
                    changes += self._import_change(node, begin, end)
                if isinstance(node, ast.Import):
                    text = self.old[begin:end]
                    new = self._plain_import(node)
                    if new is not None:
                        changes.append((begin, end, new))
        changes += self._name_changes(place)
        changes += self._token_changes(starts, in_imports)
        return replaced(self.old, changes, self.path)

    def _plain_import(self, node: ast.Import) -> str | None:
        new = [ast.alias(self.moves.modules.get(alias.name, alias.name), alias.asname) for alias in node.names]
        if [alias.name for alias in new] == [alias.name for alias in node.names]:
            return None
        shown = []
        for before, alias in zip(node.names, new, strict=True):
            if alias.asname is None and "." not in before.name and before.name != alias.name:
                # `import replay` of a module that lies in a package now
                package, _, leaf = alias.name.rpartition(".")
                if leaf != before.name:
                    raise Refused(f"{self.path}:{node.lineno}: import {before.name} cannot be rewritten")
                shown.append(f"from {package} import {leaf}")
            else:
                shown.append(f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else ""))
        if len(shown) > 1:
            raise Refused(f"{self.path}:{node.lineno}: an import of several modules")
        return shown[0]

    def _import_change(self, node: ast.ImportFrom, begin: int, end: int) -> Iterator[tuple[int, int, str]]:
        groups = self.imports[node]
        assert groups
        text = self.old[begin:end]
        head = re.match(r"from\s+([\w.]+)\s+import\b", text)
        assert head, text
        if len(groups) == 1 and [ast.dump(alias) for alias in groups[0][1]] == [ast.dump(a) for a in node.names]:
            yield begin + head.start(1), begin + head.end(1), groups[0][0]
            return
        rest = self.old[end : self.old.find("\n", end)] if "\n" in self.old[end:] else ""
        if "#" in text:
            raise Refused(f"{self.path}:{node.lineno}: a comment inside an import that must be cut")
        indent = " " * node.col_offset
        comment = rest if rest.strip().startswith("#") else ""  # such as noqa: it holds for each
        yield begin, end, f"{comment}\n{indent}".join(show_import(target, names) for target, names in groups)

    def _name_changes(self, place: Callable[[int, int], int]) -> Iterator[tuple[int, int, str]]:
        """Names of imported modules, and dotted names of modules in code."""
        inside = {id(child) for node in self.nodes if isinstance(node, ast.JoinedStr) for child in ast.walk(node)}
        covered: set[int] = set()
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and id(node) not in inside and id(node) not in covered:
                dotted = dotted_name(node)
                if dotted and dotted in self.moves.modules and self.moves.modules[dotted] != dotted and self._is_module(dotted):
                    for child in ast.walk(node):
                        covered.add(id(child))
                    yield (
                        place(node.lineno, node.col_offset),
                        place(node.end_lineno or 0, node.end_col_offset or 0),
                        self.moves.modules[dotted],
                    )
        for node in self.nodes:
            if isinstance(node, ast.Name) and node.id in self.renamed and id(node) not in inside and id(node) not in covered:
                begin = place(node.lineno, node.col_offset)
                yield begin, begin + len(node.id), self.renamed[node.id]

    def _is_module(self, dotted: str) -> bool:
        """Return whether the first name of a dotted one is bound by a plain import here."""
        return dotted.split(".")[0] in self.plain_imports

    def _token_changes(self, starts: list[int], imports: list[tuple[int, int]]) -> Iterator[tuple[int, int, str]]:
        """Strings and comments."""
        called = {
            starts[constant.lineno - 1] + constant.col_offset: constant.value
            for node in self.nodes
            if (constant := imported_by_call(node)) is not None and constant.value in self.moves.modules
        }
        for token in tokenize.generate_tokens(io.StringIO(self.old).readline):
            if token.type not in (tokenize.STRING, tokenize.COMMENT):
                continue
            begin = starts[token.start[0] - 1] + token.start[1]
            if begin in called:
                yield begin, begin + len(token.string), json.dumps(self.moves.modules[called[begin]])
                continue
            new = map_string(self, token.string, token.type == tokenize.STRING)
            if new != token.string:
                yield begin, begin + len(token.string), new


def map_string(source: Source, text: str, is_string: bool) -> str:
    """Map what a string literal or a comment says."""
    is_raw = not is_string or "r" in re.match(r"[A-Za-z]*", text)[0].lower()  # type: ignore[index]
    parts = [text] if is_raw else re.split(r"(\\[ntr])", text)  # `\nfrom` begins a line, and no word
    new = "".join(source.texts.map(part) for part in parts)
    if is_string:
        if "f" in re.match(r"[A-Za-z]*", text)[0].lower():  # type: ignore[index]
            for old, name in source.renamed.items():
                new = re.sub(rf"(?<=\{{){old}(?=[.(])|(?<=[( ]){old}(?=\.\w+[(}}])", name, new)
        new = relative_modules(source, new)
    return new


def relative_modules(source: Source, text: str) -> str:
    """Names of modules from within their package: ``:mod:`.log``` in the docstring of a package."""
    if not source.path.endswith("__init__.py"):
        return text
    package = module_names(source.path)[-1 if source.path.startswith("faults") else 0]
    home = module_names(source.new_path)[-1 if source.path.startswith("faults") else 0]

    def new(match: re.Match[str]) -> str:
        full = f"{package}.{match[1]}"
        if full not in source.moves.modules:
            return match[0]
        target = source.moves.modules[full]
        return f":mod:`.{target.removeprefix(home + '.')}`" if target.startswith(home + ".") else f":mod:`{target}`"

    return re.sub(r":mod:`\.([\w.]+)`", new, text)


def imported_by_call(node: ast.AST) -> ast.Constant | None:
    """Return the name in ``importlib.import_module("name")``."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and dotted_name(node.func).endswith("import_module"):
        if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            return node.args[0]
    return None


def dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted_name(node.value)):
        return f"{base}.{node.attr}"
    return ""


def replaced(text: str, changes: Iterable[tuple[int, int, str]], path: str) -> str:
    last, parts = 0, []
    for begin, end, new in sorted(set(changes)):
        if begin < last:
            raise Refused(f"{path}: two changes of one place: {text[begin:end]!r}")
        parts += [text[last:begin], new]
        last = end
    return "".join([*parts, text[last:]])


# -- the same tree ------------------------------------------------------------------------------------------------


_IMPORTS = (ast.Import, ast.ImportFrom)


def difference(old: Any, new: Any, source: Source | None) -> str:
    """Return where two syntax trees differ, imports left out and names of modules mapped; empty if they do not.

    What is compared is what ``ast.dump`` shows: the types of nodes and all their fields, but no positions.
    """
    if isinstance(old, list):
        old = [node for node in old if not isinstance(node, _IMPORTS)]
        new = [node for node in new if not isinstance(node, _IMPORTS)] if isinstance(new, list) else new
        if not isinstance(new, list) or len(old) != len(new):
            return f"{show(old)} -> {show(new)}"
        return next((found for pair in zip(old, new) if (found := difference(*pair, source))), "")
    if not isinstance(old, ast.AST):
        return "" if type(old) is type(new) and old == new else f"{old!r} -> {new!r}"
    if source:
        if source.wrapped and is_docstring(old) and is_docstring(new):  # lines of it were wrapped: white space counts not
            text = relative_modules(source, source.texts.map(old.value.value))
            return "" if text.split() == new.value.value.split() else f"{text[:300]!r} -> {show(new)}"
        node = mapped(old, source)
        if node is not old:  # what has a new name is compared as it is
            return difference(node, new, None)
    if type(old) is not type(new):
        return f"{show(old)} -> {show(new)}"
    for field in old._fields:
        before, after = getattr(old, field, None), getattr(new, field, None)
        if before is not after and (found := difference(before, after, source)):
            return found
    return ""


def is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def mapped(node: ast.AST, source: Source) -> ast.AST:
    """Return a node of the old tree as it must be in the new one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return ast.Constant(relative_modules(source, source.texts.map(node.value)), node.kind)
    if isinstance(node, ast.Name) and node.id in source.renamed:
        return ast.Name(source.renamed[node.id], node.ctx)
    if isinstance(node, ast.Attribute) and source.plain_imports and (dotted := dotted_name(node)) in source.moves.modules:
        new = source.moves.modules[dotted]
        if new != dotted and dotted.split(".")[0] in source.plain_imports:
            return ast.parse(new, mode="eval").body
    if (constant := imported_by_call(node)) is not None and constant.value in source.moves.modules:
        assert isinstance(node, ast.Call)
        return ast.Call(node.func, [ast.Constant(source.moves.modules[constant.value])], node.keywords)
    return node


def show(node: Any) -> str:
    text = ast.dump(node) if isinstance(node, ast.AST) else str([type(each).__name__ for each in node])
    return text[:300]


def bound_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that imports bind in a module."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {(alias.asname or alias.name) for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name.split(".")[0]) for alias in node.names}
    return found


# -- paths that begin at __file__ -----------------------------------------------------------------------------------


def file_paths(path: str, new_path: str, text: str, moves: Moves) -> Iterator[tuple[int, int, str, str]]:
    """Yield (begin, end, old, new) of each expression of a file that is a place relative to ``__file__``."""
    if "__file__" not in text:
        return
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    tree = ast.parse(text)
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Name) and node.id == "__file__"):
            continue
        place: PurePosixPath | None = None
        expression: ast.AST = node
        whole: ast.AST | None = None
        up = parents.get(id(node))
        if not (isinstance(up, ast.Call) and isinstance(up.func, ast.Name) and up.func.id == "Path"):
            continue
        expression, place = up, PurePosixPath(path)
        resolved = False
        while True:
            up = parents.get(id(expression))
            if isinstance(up, ast.Attribute) and up.value is expression and up.attr == "parent":
                place, expression = place.parent, up
            elif isinstance(up, ast.Attribute) and up.attr in ("resolve", "with_name") and up.value is expression:
                call = parents.get(id(up))
                assert isinstance(call, ast.Call)
                if up.attr == "resolve":
                    resolved, expression = True, call
                elif len(call.args) == 1 and isinstance(call.args[0], ast.Constant):
                    place, expression = place.with_name(call.args[0].value), call
                else:
                    break
            elif isinstance(up, ast.Attribute) and up.attr == "parents" and up.value is expression:
                sub = parents.get(id(up))
                if isinstance(sub, ast.Subscript) and isinstance(sub.slice, ast.Constant):
                    place, expression = place.parents[sub.slice.value], sub
                else:
                    break
            elif (
                isinstance(up, ast.BinOp)
                and isinstance(up.op, ast.Div)
                and up.left is expression
                and isinstance(up.right, ast.Constant)
            ):
                place, expression = place / up.right.value, up
            else:
                break
        if isinstance(parents.get(id(expression)), ast.FormattedValue) or any(
            isinstance(each, ast.JoinedStr) for each in ancestors(expression, parents)
        ):
            yield from ()  # positions inside f-strings are not known to Python 3.11: see _in_f_string
            old = find_in_f_string(text, expression)
        else:
            begin = starts[expression.lineno - 1] + expression.col_offset  # type: ignore[attr-defined]
            end = starts[expression.end_lineno - 1] + expression.end_col_offset  # type: ignore[attr-defined]
            old = text[begin:end]
        target = new_place(place, moves)
        if target is None:
            yield 0, 0, old, f"?? {place}"
            continue
        here, there = PurePosixPath(path), PurePosixPath(new_path)
        if target == place and (
            here.parent == there.parent
            or (len(here.parts) == len(there.parts) and place in here.parents and place in there.parents)
        ):
            continue
        new = path_expression(PurePosixPath(new_path), target, resolved, quote="'" if "'" in old else '"', old=old)
        if new != old:
            yield 0, 0, old, new


def ancestors(node: ast.AST, parents: dict[int, ast.AST]) -> Iterator[ast.AST]:
    while (up := parents.get(id(node))) is not None:
        yield up
        node = up


def find_in_f_string(text: str, expression: ast.AST) -> str:
    for quote in ('"', "'"):
        shown = ast.unparse(expression).replace("'", quote)
        if shown in text:
            return shown
    return ast.unparse(expression)


def new_place(place: PurePosixPath, moves: Moves) -> PurePosixPath | None:
    """Return where a file or folder of the old tree is in the new one; None for a folder that was divided."""
    name = str(place)
    if name == ".":
        return place
    if name in moves.paths:
        return PurePosixPath(moves.paths[name])
    below = [old for old in moves.paths if old.startswith(name + "/")]
    if not below:
        return None
    if any(old == new for old, new in ((old, moves.paths[old]) for old in below)) or name in ("tests", "benchmarks", "suites"):
        return place
    if all(moves.paths[old].startswith(name + "/") for old in below):
        return place
    return None


def path_expression(file: PurePosixPath, target: PurePosixPath, resolved: bool, quote: str, old: str) -> str:
    base = "Path(__file__)" + (".resolve()" if resolved else "")
    if file.parent == target.parent and "with_name" in old:
        return f"{base}.with_name({quote}{target.name}{quote})"
    common = PurePosixPath(*[a for a, b in zip(file.parent.parts, target.parts) if a == b][: common_length(file.parent.parts, target.parts)])
    ups = len(file.parent.parts) - len([*common.parts])
    up = ".parent" if ups == 0 else f".parents[{ups}]"
    if ups == 1 and ".parent.parent" in old:
        up = ".parent.parent"
    rest = target.parts[len(common.parts):]
    return base + up + "".join(f" / {quote}{part}{quote}" for part in rest)


def common_length(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    count = 0
    for a, b in zip(one, other):
        if a != b:
            break
        count += 1
    return count


# -- other texts --------------------------------------------------------------------------------------------------


def new_markdown(path: str, new_path: str, text: str, moves: Moves, texts: Texts) -> str:
    """Map a page: names and paths, and links between pages."""
    folder, home = PurePosixPath(path).parent, PurePosixPath(new_path).parent

    def link(match: re.Match[str]) -> str:
        target, mark, fragment = match[1].partition("#")
        if not target or "://" in target:
            return match[0]
        old = os.path.normpath(folder / target)
        new = moves.paths.get(old)
        if new is None and any(each.startswith(old + "/") for each in moves.paths):
            new = old
        if new is None:
            return match[0]
        shown = os.path.relpath(new, home) if str(home) != "." else new
        if target.endswith("/") and not shown.endswith("/"):
            shown += "/"
        return f"]({shown}{mark}{fragment})"

    def filled(match: re.Match[str]) -> str:
        """`a/x.py`, `y.py`: the folder of the first one is meant for all."""
        begin = match[2]

        def named(bare: re.Match[str]) -> str:
            full = f"{begin}{bare[1]}"
            known = any(place in moves.moved for place in (full, f"chaoskit/{full}"))
            return f"`{full}`" if known else bare[0]

        return match[1] + re.sub(r"`(\w+\.py)`", named, match[3])

    text = re.sub(r"(`((?:[\w-]+/)+)\w+\.py`)((?:(?:,| and) `\w+\.py`)+)", filled, text)
    parts = re.split(r"(\]\([^)\s]+\))", text)
    return "".join(re.sub(r"\]\(([^)\s]+)\)", link, part) if part.startswith("](") else texts.map(part) for part in parts)


# -- the whole ----------------------------------------------------------------------------------------------------


def git(tree: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(tree), *arguments], check=True, capture_output=True, text=True).stdout


def whole_words(text: str) -> re.Pattern[str]:
    """Return a pattern of a text that does not go on as a word: ``.parent`` is not in ``.parents``."""
    return re.compile(re.escape(text) + (r"(?!\w)" if text[-1:].isalnum() else ""))


def edited(path: str, text: str, edits: dict[str, list[dict[str, str]]], problems: list[str]) -> str:
    for edit in edits.pop(path, []):
        if edit.get("after"):
            edits.setdefault(f"after:{path}", []).append(edit)
            continue
        pattern, count = whole_words(edit["old"]), int(edit.get("count", "1"))
        if (found := len(pattern.findall(text))) != count:
            problems.append(f"edits: {path}: {edit['old']!r} stands there {found} times, not {count}")
            continue
        text = pattern.sub(lambda _, new=edit["new"]: new, text)  # type: ignore[misc]
    return text


def load_edits(name: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    if (HERE / name).exists():
        for entry in tomllib.loads((HERE / name).read_text()).get("edit", []):
            found[entry["file"]].append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--propose-paths", action="store_true")
    parser.add_argument("--keep-going", action="store_true")
    options = parser.parse_args()
    try:
        Move(options.tree.resolve(), options).run()
    except Refused as refused:
        sys.exit(f"refused:\n{refused}")


class Move:
    def __init__(self, tree: Path, options: argparse.Namespace) -> None:
        self.tree, self.options = tree, options
        if git(tree, "status", "--porcelain").strip():
            raise Refused("the checkout has changes, or files that git does not know")
        self.files = set(git(tree, "ls-files", "-z").split("\0")) - {""}
        self.moves = Moves(self.files)
        self.texts = Texts(self.moves)
        self.sources: dict[str, Source] = {}
        self.new: dict[str, str] = {}  # new path -> text
        self.problems: list[str] = []
        self.wrapped: list[str] = []

    def fail(self, what: str) -> None:
        if self.problems:
            raise Refused(f"{what}:\n" + "\n".join(self.problems))

    def run(self) -> None:
        if self.options.propose_paths:
            self.propose_paths()
            return
        self.compute()
        self.fail("the tree cannot be rewritten")
        for source in self.sources.values():
            self.check_same(source, source.new)
        self.fail("the trees differ")
        if self.options.dry_run:
            self.summary()
            return
        self.apply()
        import checks  # beside this file

        checks.after(self)
        self.summary()

    def propose_paths(self) -> None:
        for path in sorted(self.files):
            if path in self.moves.paths and path.endswith(".py") and (self.tree / path).is_file():
                text = (self.tree / path).read_text()
                found = {(old, new) for _, _, old, new in file_paths(path, self.moves.paths[path], text, self.moves)}
                for old, new in sorted(found, key=lambda pair: -len(pair[0])):
                    if old == new:
                        continue
                    text, count = whole_words(old).subn(lambda _, new=new: new, text)  # type: ignore[misc]
                    print(f"[[edit]]\nfile = {json.dumps(path)}\nold = {json.dumps(old)}\nnew = {json.dumps(new)}\ncount = \"{count}\"\n")

    def compute(self) -> None:
        edits, paths, patches = load_edits("edits.toml"), load_edits("file_paths.toml"), {}
        for path, new_path in sorted(self.moves.paths.items()):
            file = self.tree / path
            if file.is_symlink() or path.endswith(BINARY):
                continue
            try:
                text = file.read_text()
            except UnicodeDecodeError:
                continue
            if path.endswith(".py"):
                self.check_file_paths(path, text, paths)
            text = edited(path, text, paths, self.problems)
            text = edited(path, text, edits, self.problems)
            if path.endswith(".py"):
                try:
                    self.sources[new_path] = source = self.source(path, new_path, text)
                except Refused as refused:
                    self.problems.append(str(refused))
                    continue
                self.new[new_path] = source.new
            elif path.endswith(".md"):
                self.new[new_path] = new_markdown(path, new_path, text, self.moves, self.texts)
            elif re.fullmatch(r"tests/promises_off\w*\.toml", path):
                patches[new_path] = text
            else:
                self.new[new_path] = self.texts.map(text)
        for new_path, text in patches.items():
            self.new[new_path] = self.patches(text)
        for path in [path for path in edits if path.startswith("after:")]:
            self.after(path.removeprefix("after:"), edits.pop(path))
        for path in {**edits, **paths}:
            self.problems.append(f"edits: {path} is not in the tree")
        self.new_packages()
        self.project()

    def source(self, path: str, new_path: str, text: str) -> Source:
        return Source(path, new_path, job_strings(path, new_path, text, self.moves), self.moves, self.texts)

    def check_file_paths(self, path: str, text: str, paths: dict[str, list[dict[str, str]]]) -> None:
        """Refuse a path relative to ``__file__`` that must change and is not in the reviewed table."""
        listed = {(edit["old"], edit["new"]) for edit in paths.get(path, [])} | {
            (edit["old"], "*") for edit in paths.get(path, [])
        }
        for _, _, old, new in file_paths(path, self.moves.paths[path], text, self.moves):
            if old != new and (old, "*") not in listed and not any(old in each for each, _ in listed):
                self.problems.append(f"file_paths.toml: {path}: {old!r} must be {new!r} (not in the table)")

    def patches(self, text: str) -> str:
        """Map the file of changes that turn features off: their texts are code of the file that each names."""
        blocks = re.split(r"(?m)^(?=\[\[off\]\])", text)
        for number, block in enumerate(blocks):
            if (file := re.search(r'(?m)^file = "(.*)"', block)) is None:
                continue
            new = self.moves.paths.get(file[1], file[1])
            mapped = self.texts.map(block)
            if source := self.sources.get(new):
                for old, name in source.renamed.items():
                    mapped = re.sub(rf"(?<![\w.\"'/]){old}(?=\.\w)", name, mapped)
            blocks[number] = mapped
        return self.texts.map(blocks[0]) + "".join(blocks[1:]) if len(blocks) > 1 else self.texts.map(text)

    def new_packages(self) -> None:
        for folder, doc in self.moves.docs.items():
            place = f"{folder}/__init__.py"
            if place in self.new:
                self.problems.append(f"map.toml: {folder} has an __init__.py already")
            self.new[place] = f'"""{doc}"""\n'

    def after(self, path: str, edits: list[dict[str, str]]) -> None:
        """Make edits in the new text of a file that is no Python: the old text of each is mapped, the new one is not."""
        place = self.moves.paths[path]
        for edit in edits:
            old = self.texts.map(edit["old"])
            if path.endswith(".py") or self.new[place].count(old) != 1:
                self.problems.append(f"edits: {path}: {old!r} does not stand once in the new text")
            self.new[place] = self.new[place].replace(old, edit["new"])

    def project(self) -> None:
        """Write the lists of packages in pyproject.toml anew: those that are installed, and those of two contracts."""
        self.listed("packages", "", [name for name, _ in self.installed()])
        top = {name.split(".")[1] for path in self.new if path.endswith(".py") for name in module_names(path, is_new=True) if name.startswith("chaoskit.")}
        parts = {f"chaoskit.{part}" for part in top - {"suites"}}
        self.listed("source_modules", 'id = "canary"', sorted(parts))
        old = tomllib.loads((self.tree / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        (public,) = [contract for contract in old if contract["id"] == "public"]
        forbidden = {
            ".".join(new.split(".")[:2])
            for name in public["forbidden_modules"]
            for before, new in self.moves.modules.items()
            if before == name or before.startswith(f"{name}.")
        }
        self.listed("forbidden_modules", 'id = "public"', sorted(forbidden))

    def installed(self) -> list[tuple[str, str]]:
        found = []
        for path in self.new:
            parts = path.split("/")
            if parts[-1] == "__init__.py" and parts[0] in ("chaoskit", "faults", "suites", "fixtures"):
                name = ".".join(parts[:-1])
                found.append((name if parts[0] == "chaoskit" else f"chaoskit.{name}", path))
                if parts[0] == "faults":
                    found.append((name, path))
        return sorted(found)

    def listed(self, key: str, after: str, names: list[str]) -> None:
        text = self.new["pyproject.toml"]
        begin = text.index(after) if after else 0
        block = f"{key} = [\n" + "".join(f'    "{name}",\n' for name in names) + "]"
        rest, count = re.subn(rf"^{key} = \[\n(?:    .*\n)*\]", block, text[begin:], count=1, flags=re.M)
        if count != 1:
            self.problems.append(f"pyproject.toml: no list {key} after {after!r}")
        self.new["pyproject.toml"] = text[:begin] + rest

    def check_same(self, source: Source, new: str) -> None:
        try:
            tree = ast.parse(new)
            found = difference(source.tree, tree, source)
        except SyntaxError as error:
            self.problems.append(f"{source.new_path}: {error}")
            return
        if found:
            self.problems.append(f"{source.path}: another tree: {found}")
        names = {source.renamed.get(name, name) for name in bound_names(source.nodes)}
        if names != (bound := bound_names(ast.walk(tree))):
            self.problems.append(f"{source.path}: imports bind other names: {sorted(names ^ bound)}")

    def apply(self) -> None:
        for path, doc in self.moves.dropped.items():
            text = (self.tree / path).read_text()
            if not isinstance(ast.parse(text).body[0], ast.Expr) or len(ast.parse(text).body) != 1:
                raise Refused(f"{path} is more than a docstring, and must not be dropped")
        # in two steps, since one file may come to where another one was
        moved = sorted(self.moves.moved.items())
        for path in self.moves.dropped:
            git(self.tree, "rm", "--quiet", path)
        for old, new in moved:
            (self.tree / f"{old}.moving").parent.mkdir(parents=True, exist_ok=True)
            os.rename(self.tree / old, self.tree / f"{old}.moving")
        for old, new in moved:
            (self.tree / new).parent.mkdir(parents=True, exist_ok=True)
            os.rename(self.tree / f"{old}.moving", self.tree / new)
        for path, text in self.new.items():
            file = self.tree / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.exists() or file.read_text() != text:
                file.write_text(text)
        for old, _ in moved:
            folder = (self.tree / old).parent
            while folder != self.tree and folder.is_dir() and not any(each.name != "__pycache__" for each in folder.iterdir()):
                for left in [*folder.rglob("*")][::-1]:
                    left.rmdir() if left.is_dir() else left.unlink()
                folder.rmdir()
                folder = folder.parent
        git(self.tree, "add", "--all")

    def summary(self) -> None:
        print(f"{len(self.moves.moved)} of {len(self.files)} files move; {len(self.sources)} Python files compared")
        for source in self.sources.values():
            for kept in source.kept:
                print(f"keeps its old name: {source.new_path}: {kept}")


def job_strings(path: str, new_path: str, text: str, moves: Moves) -> str:
    """Paths of jobs from the folder of a test: ``jobs/troubled.py:plain``, as ``chaos.run`` takes them."""
    if not path.startswith("tests/") or path.startswith(("tests/jobs/", "tests/support/")):
        return text
    folder, home = str(PurePosixPath(path).parent), str(PurePosixPath(new_path).parent)

    def new(match: re.Match[str]) -> str:
        old = os.path.normpath(f"{folder}/{match[2]}")
        return match[1] + os.path.relpath(moves.paths[old], home) if old in moves.paths else match[0]

    def roomed(match: re.Match[str]) -> str:
        target = moves.paths.get(f"tests/jobs/{match[3]}")
        return match[0] if target is None else f"{match[1]}{match[2]}{target.split('/')[2]}{match[2]} / {match[2]}{match[3]}"

    text = re.sub(r"(\bJOBS / |[\"']jobs[\"'] / )([\"'])(\w+\.py)\b", roomed, text)
    return re.sub(r"([\"'])((?:\.\./)*jobs/\w+\.py)", new, text)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
