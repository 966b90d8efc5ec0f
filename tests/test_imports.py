"""Who may import whom (design, section 2): by the text of every module, and by what a fresh process loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ftnb

PACKAGE = Path(ftnb.__file__).parent

# From left to right. The top-level modules (demo, lab, cli) are shells around everything and may import all.
ALLOWED = {
    "errors": set(),
    "core": {"errors"},
    "wire": {"core", "errors"},
    "display": {"core", "errors"},
    "rank": {"wire", "core", "errors"},
    "supervisor": {"wire", "core", "errors"},
    "client": {"wire", "core", "errors"},
    "widgets": {"client", "display", "core", "errors"},
    "magics": {"widgets", "client", "display", "errors"},
}
# Packages from outside that a part must not import, not even inside a function.
FORBIDDEN = {
    "core": {"torch", "numpy", "zmq", "psutil", "IPython", "ipyparallel", "ipywidgets", "ipykernel"},
    "wire": {"torch", "numpy", "IPython", "ipyparallel", "ipywidgets"},
    "supervisor": {"torch", "IPython", "ipywidgets"},
    "rank": {"IPython.display", "IPython.core.display", "ipywidgets"},
    "display": {"torch", "ipyparallel", "ipywidgets"},
    "client": {"ipywidgets", "IPython.display"},
    "magics": {"torch"},
}
# `ftnb` itself (its version, the lazy public names) is no part; everyone may import it.
SHELLS = {"", "cli", "demo", "demo_cell", "lab"}


def module_name(path):
    parts = ["ftnb", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules():
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if "_notebooks" not in path.parts}


def part_of(module):
    """`ftnb.core.ledger` belongs to `core`, `ftnb` itself to the part with the empty name."""
    return module.split(".")[1] if "." in module else ""


def imports(tree, module, is_package=False):
    """(imported name, line, only for type checking) of every import, wherever it stands."""
    typing_only = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only.update(id(inner) for child in node.body for inner in ast.walk(child))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: count the levels up from this module
                home = module.split(".") if is_package else module.split(".")[:-1]
                home = home[: len(home) - node.level + 1]
                base = ".".join([*home, base] if base else home)
            # `from ftnb import core` imports the module ftnb.core: the name may be one, too.
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, node.lineno, id(node) in typing_only


def violations(module, source, is_package=False):
    part, found = part_of(module), []
    for name, line, typing_only in imports(ast.parse(source), module, is_package):
        where = f"{module}:{line} imports {name}"
        if name.split(".")[0] == "ftnb":
            other = part_of(name)
            known = other in ALLOWED
            if known and part in ALLOWED and other != part and other not in ALLOWED[part]:
                found.append(f"{where}: {part} → {other} is not allowed")
            if other in SHELLS - {""} and part not in SHELLS:
                found.append(f"{where}: nobody imports the shells")
        elif not typing_only:
            for forbidden in FORBIDDEN.get(part, ()):
                if f"{name}.".startswith(f"{forbidden}."):
                    found.append(f"{where}: {part} does without {forbidden}")
    return found


def test_every_module_belongs_to_a_known_part():
    assert {part_of(module) for module in modules()} - SHELLS <= set(ALLOWED)


def test_the_import_graph_has_only_allowed_arrows():
    found = []
    for module, path in modules().items():
        found += violations(module, path.read_text(encoding="utf-8"), path.name == "__init__.py")
    assert not found, "\n".join(found)


def test_core_needs_the_standard_library_only():
    found = []
    for module, path in modules().items():
        if part_of(module) in ("core", "errors"):
            for name, line, _ in imports(ast.parse(path.read_text(encoding="utf-8")), module):
                if name.split(".")[0] not in sys.stdlib_module_names | {"ftnb", "__future__"}:
                    found.append(f"{module}:{line} imports {name}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ftnb.core.x", "import torch.nn as nn"),
        ("ftnb.core.x", "def f():\n    from torch import nn"),
        ("ftnb.core.x", "from ftnb import wire"),
        ("ftnb.core.x", "from ..wire import sockets"),
        ("ftnb.core.x", "from ftnb.supervisor.runs import ActiveRun"),
        ("ftnb.supervisor.x", "import torch"),
        ("ftnb.supervisor.x", "from ftnb.rank.loop import Training"),
        ("ftnb.rank.x", "from IPython.display import display"),
        ("ftnb.rank.x", "from IPython import display"),
        ("ftnb.rank.x", "import ftnb.display.table"),
        ("ftnb.client.x", "from ftnb.display.live import Live"),
        ("ftnb.magics.x", "from ftnb.core.report import Report"),
        ("ftnb.wire.x", "from ftnb import cli"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ftnb.core.x", "from ftnb.errors import UsageError"),
        ("ftnb.core.x", "from .sampler import split"),
        ("ftnb.rank.worker", "from IPython import get_ipython"),
        ("ftnb.rank.worker", "from IPython.core.interactiveshell import InteractiveShell"),
        ("ftnb.rank.x", "import torch.distributed as dist"),
        ("ftnb.supervisor.x", "import ftnb"),
        ("ftnb.cli", "from ftnb.demo import demo"),
        ("ftnb.client.x", "if TYPE_CHECKING:\n    from IPython.display import HTML"),
    ],
)
def test_an_allowed_import_is_let_through(module, source):
    assert not violations(module, source)


# --- what is loaded in a fresh process ---------------------------------------------------------------------


def loaded_by(names):
    """The top-level names and IPython's own modules in `sys.modules` after importing `names`."""
    program = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(names)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def of_part(*parts):
    return [module for module in modules() if part_of(module) in parts and not module.endswith("__main__")]


@pytest.mark.parametrize(
    ("parts", "forbidden"),
    [
        (("", "core", "errors"), {"torch", "numpy", "zmq", "psutil", "IPython", "ipyparallel", "ipykernel"}),
        (("wire",), {"torch", "numpy", "IPython", "ipyparallel"}),
        # ipyparallel itself loads parts of IPython, so of the supervisor only torch can be asked for.
        (("supervisor",), {"torch"}),
        (("client", "display", "magics"), {"torch"}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_a_fresh_process_does_not_load(parts, forbidden):
    loaded = loaded_by(of_part(*parts))
    assert not forbidden & loaded
    own = {part_of(name) for name in loaded if name.split(".")[0] == "ftnb"}
    reachable = set(parts).union(*(ALLOWED.get(part, set()) for part in parts), {""})
    assert own <= reachable


def test_a_rank_needs_no_torch_before_its_training_thread_starts():
    """The agent answers the supervisor while torch is still being imported."""
    loaded = loaded_by(["ftnb.rank.agent", "ftnb.rank.engine", "ftnb.rank.orders", "ftnb.rank.worker"])
    assert not {"torch", "IPython", "ipywidgets"} & loaded


def test_a_rank_loads_no_display_and_no_widgets():
    loaded = loaded_by(of_part("rank"))
    assert not {"IPython.display", "IPython.core.display", "ipywidgets"} & loaded
