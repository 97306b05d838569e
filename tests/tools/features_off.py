"""Entries of ``promises_off.toml``: small changes of the product, each of which turns one feature off.

An entry names a function and the body that it has instead. Its decorators, parameters and docstring
stay:

    [[off]]
    what = "the coordinator forgets a request when it ends"          # what does not work now
    promises = ["A request is in the coordinator's record"]          # sentences, as the tests quote them
    function = "chaoskit/coordinator/log.py:Record.note_request"     # file and qualified name
    body = "pass"

The body reads the parameters of the function and the names of its file. It may call the function as
it was by the name ``original``, with ``self`` first where there is one:

    body = "return original(self, message, limit_s=math.inf)"

``original`` is defined inside the function. A name that the body assigns therefore has that value
in ``original``, too, which replaces a function that it calls:

    body = '''
    check_chunk = lambda *arguments: None
    return original(source, entry, offset)'''

A function inside another one is named ``outer.inner``. A constant or the default of a field has
another value:

    constant = "chaoskit/coordinator/limits.py:Limits.pause_s"
    value = "math.inf"

A change that cannot be said so replaces text that stands once in the function:

    function = "chaoskit/coordinator/log.py:Record.note_request"
    old = "self._write(request)"
    new = "pass"
"""

from __future__ import annotations

import ast
import builtins
import symtable
import textwrap
import tomllib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from mutants import ROOT, Mutant

ENTRIES = ROOT / "tests" / "tools" / "promises_off.toml"
_ORIGINAL = "original"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Off(NamedTuple):
    """A change that turns a feature off, as the docstring of this file explains it.

    Attributes:
        what: what does not work then, in words.
        promises: sentences of the documentation that it breaks.
        function: ``file:qualified name``; its ``body`` is replaced, or the text ``old`` in it with
            ``new``.
        constant: ``file:qualified name``; its ``value`` is replaced.
    """

    what: str
    promises: list[str]
    function: str = ""
    body: str = ""
    constant: str = ""
    value: str = ""
    old: str = ""
    new: str = ""

    @property
    def file(self) -> str:
        """Path of the changed file, relative to the root of the tree."""
        return (self.function or self.constant).partition(":")[0]

    def mutant(self, root: Path = ROOT) -> Mutant:
        """Return the change in a tree.

        Raises:
            ValueError: its place is not there exactly once, the result is no valid Python, or it
                changes nothing.
        """
        try:
            source = (root / self.file).read_bytes()
        except OSError as error:
            raise ValueError(f"{self.what!r}: {error}") from None
        mutant = self._change(source)
        _check(source, mutant)
        return mutant

    def _change(self, source: bytes) -> Mutant:
        if self.constant:
            definition = self._definition(source, self.constant)
            if not isinstance(definition, ast.Assign | ast.AnnAssign) or definition.value is None:
                raise ValueError(f"{self.what!r}: {self.constant} is no constant with a value")
            return self._mutant(source, *_span(source, definition.value), self.value)
        function = self._definition(source, self.function)
        if not isinstance(function, _Function):
            raise ValueError(f"{self.what!r}: {self.function} is no function")
        if self.old:
            return self._with_text(source, *_span(source, function))
        if self.body:
            return self._mutant(source, *_span(source, function), self._with_body(source, function))
        raise ValueError(f"{self.what!r}: it has neither body nor old text")

    def _definition(self, source: bytes, place: str) -> ast.stmt:
        names = place.partition(":")[2].split(".")
        definitions = [*_definitions(ast.parse(source), names)]
        if len(definitions) != 1:
            raise ValueError(
                f"{self.what!r}: {place} is defined {len(definitions)} times instead of once"
            )
        return definitions[0]

    def _with_text(self, source: bytes, begin: int, end: int) -> Mutant:
        old = self.old.encode()
        if (count := source.count(old, begin, end)) != 1:
            raise ValueError(
                f"{self.what!r}: its text stands in {self.function} {count} times, not once"
            )
        at = source.index(old, begin)
        return self._mutant(source, at, at + len(old), self.new)

    def _with_body(self, source: bytes, function: _Function) -> str:
        """Return the text of a function with another body, and with itself inside it if that body calls it."""
        body = textwrap.dedent(self.body).strip("\n")
        try:
            statements = ast.parse(body)
        except SyntaxError as error:
            raise ValueError(f"{self.what!r}: its body is no valid Python: {error}") from None
        self._check_assignments(statements, function)
        begin, end = _span(source, function)
        body_at = _span(source, function.body[0])
        header = source[begin : body_at[0]].decode().rstrip()
        parts = [header]
        pad = " " * (
            function.col_offset + 1
        )  # less than that of the body before, whose text stays as it is
        if ast.get_docstring(function) is not None:
            parts.append(pad + source[slice(*body_at)].decode())
        if any(
            isinstance(node, ast.Name) and node.id == _ORIGINAL for node in ast.walk(statements)
        ):
            parts.append(
                pad
                + source[begin:end].decode().replace(f"def {function.name}", f"def {_ORIGINAL}", 1)
            )
        return "\n".join([*parts, textwrap.indent(body, pad)])

    def _check_assignments(self, body: ast.Module, function: _Function) -> None:
        """Refuse a name that the body assigns or defines and that neither it nor the function reads."""
        functions = {node.name for node in body.body if isinstance(node, _Function)}
        idle = (_names(body, ast.Store) | functions) - _names(body, ast.Load)
        if _ORIGINAL in _names(body, ast.Load):
            idle -= _names(function, ast.Load) - _names(function, ast.Store)
        if idle:
            raise ValueError(
                f"{self.what!r}: its body assigns {sorted(idle)}, which {self.function} does not read"
            )

    def _mutant(self, source: bytes, begin: int, end: int, text: str) -> Mutant:
        return Mutant(self.file, source.count(b"\n", 0, begin) + 1, self.what, begin, end, text)


def entries() -> list[Off]:
    """Return every entry of the file."""
    return [Off(**fields) for fields in tomllib.loads(ENTRIES.read_text())["off"]]


def without_entry() -> list[str]:
    """Return the promises that no entry breaks yet, as the file lists them."""
    promises: list[str] = tomllib.loads(ENTRIES.read_text())["without"]
    return promises


def _definitions(scope: ast.AST, names: list[str]) -> Iterator[ast.stmt]:
    """Yield the statements that define a qualified name, also those below an ``if`` or ``with``."""
    for node in ast.iter_child_nodes(scope):
        name = _defined_name(node)
        if isinstance(node, ast.stmt) and name == names[0]:
            if len(names) == 1:
                yield node
            else:
                yield from _definitions(node, names[1:])
        elif not isinstance(node, _Function | ast.ClassDef):
            yield from _definitions(node, names)


def _defined_name(node: ast.AST) -> str:
    """Return the name that a statement defines; "" for any other."""
    match node:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return name
        case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
            return name
    return ""


def _span(source: bytes, node: ast.stmt | ast.expr) -> tuple[int, int]:
    """Return where the text of a node begins and ends, in bytes."""
    starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return starts[node.lineno - 1] + node.col_offset, starts[
        node.end_lineno - 1
    ] + node.end_col_offset


def _check(source: bytes, mutant: Mutant) -> None:
    """Refuse a change that breaks the file, has no effect, or reads a name that is not there."""
    after, what = mutant.apply(source), mutant.change
    try:
        compile(after, mutant.path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ValueError(f"{what!r}: the result is no valid Python: {error}") from None
    if ast.dump(ast.parse(after)) == ast.dump(ast.parse(source)):
        raise ValueError(f"{what!r}: it changes nothing in {mutant.path}")
    if unknown := _unknown_names(after) - _unknown_names(source):
        raise ValueError(f"{what!r}: {mutant.path} has no {sorted(unknown)}")


def _unknown_names(source: bytes) -> set[str]:
    """Return the names that functions of a file read from its globals, and that neither it nor Python defines."""
    module = symtable.symtable(source.decode(), "", "exec")
    tables = [module]
    for table in tables:
        tables += table.get_children()
    read = {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if symbol.is_global()
    }
    defined = {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    return read - defined - set(dir(builtins))


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Return the names in a node that are read, or those that are assigned."""
    return {
        name.id
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, context)
    }
