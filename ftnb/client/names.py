"""Which names of the notebook a cell needs, and how they travel to the ranks.

The cell runs on the ranks in a namespace of its own. What it reads without defining it, and what the
notebook has, is sent along: modules by name (unpickling imports them), the rest by value (cloudpickle).
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import symtable
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ftnb.errors import CellError, UsageError

MAX_BYTES = 64 * 1024 * 1024
SUBMODULES = "_ftnb_modules"  # travels among the names, so that unpickling it imports them
_IPYTHON_OWN = frozenset({"In", "Out", "get_ipython", "exit", "quit", "open", "display"})


def check_syntax(source: str) -> None:
    """Raise a `CellError` that shows line and caret if the cell is not valid Python."""
    try:
        compile(source, "<cell>", "exec", dont_inherit=True)
    except SyntaxError as error:
        shown = _caret_text(error)
        hint = ""
        line = (error.text or "").lstrip()
        if line[:1] in ("%", "!", "?"):
            hint = " The cell runs on the ranks as plain Python; IPython's %, ! and ? do not work in it."
        raise CellError(
            f"line {error.lineno} of the cell is not valid Python: {error.msg}. "
            f"Nothing was sent to the ranks.{hint}",
            ranks=[],
            etype=type(error).__name__,
            evalue=error.msg,
            lineno=error.lineno,
            step=None,
            traceback=shown,
        ) from None
    except ValueError as error:  # null bytes
        raise UsageError(f"The cell is not valid Python: {error}.") from None


def _caret_text(error: SyntaxError) -> str:
    lines = [f"  Cell, line {error.lineno}"]
    if error.text:
        text = error.text.rstrip("\n")
        shift = len(text) - len(text.lstrip())
        lines.append("    " + text.lstrip())
        if error.offset:
            start = max(0, error.offset - 1 - shift)
            same_line = error.end_lineno in (None, error.lineno)
            length = max(1, (error.end_offset or 0) - error.offset) if same_line else 1
            lines.append("    " + " " * start + "^" * length)
    return "\n".join([*lines, f"{type(error).__name__}: {error.msg}"])


def names_read(source: str) -> set[str]:
    """Global names that the cell reads before it has defined them (Python's builtins among them)."""
    finder = _Finder()
    finder.block(ast.parse(source).body, finder.defined)
    return finder.needed | (finder.late - finder.defined)


class _Finder:
    """Walks the statements of a cell in the order in which they run.

    `defined` holds what is certainly bound by now; a name bound in one branch only may still have to come
    from the notebook, and sending a name too many does no harm.
    """

    def __init__(self) -> None:
        self.defined: set[str] = set()
        self.needed: set[str] = set()
        self.late: set[str] = set()  # read inside functions, which run later

    def block(self, statements: Iterable[ast.stmt], defined: set[str]) -> None:
        for statement in statements:
            self.statement(statement, defined)

    def statement(self, node: ast.stmt, defined: set[str]) -> None:
        match node:
            case ast.If():
                self.expression(node.test, defined)
                branches = [set(defined), set(defined)]
                self.block(node.body, branches[0])
                self.block(node.orelse, branches[1])
                defined |= branches[0] & branches[1]
            case ast.For() | ast.AsyncFor():
                self.expression(node.iter, defined)
                self.block(node.body, defined | _stored(node.target))
                self.block(node.orelse, set(defined))
            case ast.While():
                self.expression(node.test, defined)
                self.block(node.body, set(defined))
                self.block(node.orelse, set(defined))
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self.expression(item.context_expr, defined)
                    if item.optional_vars is not None:
                        defined |= _stored(item.optional_vars)
                self.block(node.body, defined)
            case ast.Try():
                self.block([*node.body, *node.orelse], set(defined))
                for handler in node.handlers:
                    if handler.type is not None:
                        self.expression(handler.type, defined)
                    self.block(handler.body, defined | ({handler.name} if handler.name else set()))
                self.block(node.finalbody, defined)
            case _:
                self.simple(node, defined)

    def simple(self, node: ast.stmt, defined: set[str]) -> None:
        self.scopes(symtable.symtable(ast.unparse(node), "<cell>", "exec"), defined)
        if isinstance(node, ast.AugAssign):  # the symbol table counts `x += 1` as a write only
            self.needed |= _stored(node.target) - defined
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)):
            if not (isinstance(node, ast.AnnAssign) and node.value is None):
                defined |= _stored(node)
        elif isinstance(node, ast.Delete):
            gone = {target.id for target in node.targets if isinstance(target, ast.Name)}
            self.needed |= gone - defined
            defined -= gone

    def expression(self, node: ast.expr, defined: set[str]) -> None:
        self.scopes(symtable.symtable(ast.unparse(node), "<cell>", "eval"), defined)
        defined |= _stored(node)  # `:=`

    def scopes(self, table: symtable.SymbolTable, defined: set[str]) -> None:
        self.needed |= {s.get_name() for s in table.get_symbols() if s.is_referenced()} - defined
        for child in table.get_children():
            self._inner(child, defined)

    def _inner(self, table: symtable.SymbolTable, defined: set[str]) -> None:
        names = {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_global() and (symbol.is_referenced() or symbol.is_declared_global())
        }
        if str(table.get_type()) == "class":  # its body runs at once
            self.needed |= names - defined
        else:
            self.late |= names
        for child in table.get_children():
            self._inner(child, defined)


def _stored(node: ast.AST) -> set[str]:
    """Names bound by assignment anywhere below `node`, functions and comprehensions left out."""
    found: set[str] = set()
    stack: list[ast.AST] = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, ast.Name) and isinstance(current.ctx, ast.Store):
            found.add(current.id)
        if isinstance(current, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)):
            continue
        stack.extend(ast.iter_child_nodes(current))
    return found


@dataclass
class Parcel:
    """What goes to the ranks with a cell."""

    pickled: bytes | None = None  # a dict of name -> object
    sent: list[str] = field(default_factory=list)


def pack(source: str, namespace: dict[str, Any], max_bytes: int = MAX_BYTES) -> Parcel:
    """Everything of `namespace` that the cell `source` needs."""
    values = {
        name: namespace[name]
        for name in sorted(names_read(source))
        if name in namespace and not _belongs_to_ipython(name, namespace[name])
    }
    if not values:
        return Parcel()
    sent = list(values)
    if submodules := _submodules(source, values):
        values[SUBMODULES] = submodules
    return Parcel(_pickle(values, max_bytes), sent)


def _belongs_to_ipython(name: str, value: Any) -> bool:
    """IPython's own names and history, and builtins unless the notebook has given the name another value."""
    if name in _IPYTHON_OWN or re.fullmatch(r"_{1,3}|_i?\d+|_i{1,3}|_[do]h|_exit_code|__.*__", name):
        return True
    return getattr(builtins, name, builtins) is value


def _submodules(source: str, values: dict[str, Any]) -> list[types.ModuleType]:
    """Modules that the cell reaches through a package (`xml.etree.ElementTree`).

    The notebook has imported them at some time; on a rank, importing the package alone does not.
    """
    found: list[types.ModuleType] = []
    for node in ast.walk(ast.parse(source)):
        name, *attributes = _dotted(node) or [""]
        current = values.get(name)
        for attribute in attributes:
            if not isinstance(current, types.ModuleType):
                break
            current = getattr(current, attribute, None)
            if isinstance(current, types.ModuleType) and current not in found:
                found.append(current)
    return found


def _dotted(node: ast.AST) -> list[str]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) and parts else []


class _TooLarge(Exception):
    pass


class _LimitedBuffer(io.BytesIO):
    """Stops pickling once the limit is passed, before a huge array has been copied as a whole."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self.max_bytes:
            raise _TooLarge
        return super().write(data)


def _pickle(values: dict[str, Any], max_bytes: int) -> bytes:
    try:
        return _dump(values, max_bytes)
    except _TooLarge:
        name, size = _largest(values, max_bytes)
        raise UsageError(
            f"The cell uses `{name}` from the notebook ({size}); at most {max_bytes // 2**20} MB can be sent "
            f"along with a cell. Build `{name}` inside the cell, or load it there from a file.",
            name=name,
        ) from None
    except Exception as error:
        name, reason = _culprit(values, max_bytes, error)
        raise UsageError(
            f"The cell uses `{name}` from the notebook (a {type(values[name]).__qualname__}), which cannot "
            f"be sent to the ranks: {reason}. Build `{name}` inside the cell.",
            name=name,
        ) from error


def _dump(value: Any, max_bytes: int) -> bytes:
    import cloudpickle

    buffer = _LimitedBuffer(max_bytes)
    cloudpickle.dump(value, buffer)
    return buffer.getvalue()


def _largest(values: dict[str, Any], max_bytes: int) -> tuple[str, str]:
    sizes: dict[str, float] = {}
    for name, value in values.items():
        try:
            sizes[name] = len(_dump(value, max_bytes))
        except _TooLarge:
            sizes[name] = float("inf")
        except Exception:  # reported, if it comes to that, once the size is no longer the trouble
            sizes[name] = 0
    name = max(sizes, key=lambda key: sizes[key])
    size = sizes[name]
    return name, f"more than {max_bytes // 2**20} MB" if size == float("inf") else f"{size / 2**20:.0f} MB"


def _culprit(values: dict[str, Any], max_bytes: int, error: Exception) -> tuple[str, str]:
    for name, value in values.items():
        try:
            _dump(value, max_bytes)
        except _TooLarge:
            continue
        except Exception as own:
            return name, str(own) or type(own).__name__
    return next(iter(values)), str(error) or type(error).__name__
