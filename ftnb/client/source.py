"""The text of a cell: given as text, or as a function whose body is meant."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Callable
from typing import Any

from ftnb.errors import UsageError


def cell_text(cell: str | Callable[[], Any], notebook: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The source to run on the ranks, and the names that it may take along.

    Of a function the *body* is taken, as if it had been written into a cell: what it assigns is what the
    training finds. Names come from where the function was defined.
    """
    if isinstance(cell, os.PathLike) or (isinstance(cell, str) and _is_path(cell)):
        path = os.fspath(cell)
        raise UsageError(
            f"train() takes the text of a cell, not the path of a file ({path!r}). Read it first: "
            f"session.train(open({path!r}).read())"
        )
    if isinstance(cell, str):
        if not cell.strip():
            raise UsageError("The cell is empty: it must define model, optimizer, dataset and loss_fn.")
        return cell, notebook
    if not inspect.isfunction(cell):
        raise UsageError(f"train() takes the text of a cell or a function, not a {type(cell).__qualname__}.")
    if inspect.signature(cell).parameters:
        raise UsageError(
            f"The function {cell.__name__}() must take no arguments: its body is run on every rank like a "
            "cell. Read what it needs from global names."
        )
    body = _body(cell)
    closure = inspect.getclosurevars(cell).nonlocals
    return body, {**cell.__globals__, **closure}


def _is_path(text: str) -> bool:
    """Whether `text` names a file of Python code, which no cell of one line that ends so can do."""
    return "\n" not in text.strip() and text.strip().endswith(".py") and "=" not in text


def _body(function: Callable[[], Any]) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise UsageError(
            f"The source of {function.__name__}() cannot be found. Pass the cell as text instead."
        ) from None
    tree = ast.parse(source).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise UsageError("train() takes an ordinary function (def), not a lambda or coroutine.")
    _refuse_returns(function.__name__, tree)
    lines = source.splitlines(keepends=True)
    first, last = tree.body[0], tree.body[-1]
    if first.lineno == tree.lineno:  # def f(): a = 1; b = 2
        return "\n".join(ast.unparse(statement) for statement in tree.body)
    return textwrap.dedent("".join(lines[first.lineno - 1 : last.end_lineno]))


def _refuse_returns(name: str, tree: ast.FunctionDef) -> None:
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
            raise UsageError(
                f"{name}() must not return anything: its body is run on every rank like a cell, and the "
                "training takes the names it assigns (model, optimizer, dataset, loss_fn). Remove the return."
            )
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))
