"""The one session that the magics of this kernel work on, and what they remember of it."""

from __future__ import annotations

from typing import Any

from ftnb.client.run import ENDED, Run
from ftnb.client.session import Session
from ftnb.display.live import Live
from ftnb.display.status import run_status
from ftnb.errors import NoClusterError, RunError

_session: Session | None = None
_live: Live | None = None
last_cell: str | None = None


def session() -> Session:
    """The current session; raises when this notebook has none."""
    if _session is None:
        raise NoClusterError(
            "This notebook has no cluster (any more). Type %ft_cluster start, or %ft_cluster attach for one that "
            "runs already (one from before a restart of the kernel, say)."
        )
    return _session


def session_or_none() -> Session | None:
    return _session


def bind(new: Session | None) -> None:
    """Make `new` the current session; with None there is none any more."""
    global _session
    _session = new


def run() -> Run:
    """The current or last run; raises when there is none."""
    found = session().run
    if found is None:
        raise RunError(
            "Nothing has been trained on this cluster yet. Begin a cell with %%ft_train and run it."
        )
    return found


def put_in_notebook(name: str, value: Any) -> None:
    from IPython import get_ipython

    if (shell := get_ipython()) is not None:
        shell.user_ns[name] = value


def follow(run: Run) -> Live:
    """Show the live status of `run` under the cell that is running."""
    global _live
    finish_live()  # one at a time: the run before has ended, or its cell is not looked at any more
    _live = Live(fetch=run.info, render=run_status, ended=lambda info: info["state"] in ENDED).start()
    return _live


def finish_live() -> None:
    """Let the live status under an earlier cell show its last state while that can still be asked for."""
    global _live
    if _live is not None:
        _live.finish()
        _live = None


def settle_live() -> None:
    """The run has ended: let its live status show so before the cell goes on, with the ranks' last states."""
    if _live is not None:
        _live.join(1)


def activate_px(session: Session) -> None:
    """Point ipyparallel's `%%px` at the ranks of `session`, at those that live at the time of each call."""
    from IPython import get_ipython

    if get_ipython() is None:
        return
    from ftnb.client.view import RankView

    view = RankView(session)
    view.block = True
    view.activate()


def forget(session: Session) -> None:
    """Called after `session` was stopped."""
    global _session
    if _session is session:
        _session = None
        finish_live()
