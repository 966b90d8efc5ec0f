"""ftnb: see, teach and debug fault-tolerant distributed PyTorch training from a notebook.

    %load_ext ftnb
    %ft_cluster start

or, without magics, `ftnb.Session.start()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["FtnbError", "Report", "Run", "Session", "__version__", "load_ipython_extension"]

if TYPE_CHECKING:
    from ftnb.client.run import Run
    from ftnb.client.session import Session
    from ftnb.core.report import Report
    from ftnb.errors import FtnbError

# Loaded on first use: ranks and the supervisor import `ftnb` too and need none of the notebook side.
_LAZY = {
    "Session": "ftnb.client.session",
    "Run": "ftnb.client.run",
    "Report": "ftnb.core.report",
    "FtnbError": "ftnb.errors",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ftnb' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is meant for users, for tab completion."""
    return sorted(__all__)


def load_ipython_extension(ipython: Any) -> None:
    """Called by `%load_ext ftnb`."""
    from ftnb.magics import register

    register(ipython)
