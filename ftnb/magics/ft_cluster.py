"""%ft_cluster start | stop | status | attach | resize"""

from __future__ import annotations

from typing import Any

from ftnb.client.options import Option, did_you_mean
from ftnb.client.resize import NUM_RANKS
from ftnb.client.session import START_OPTIONS, Session, stop_cluster
from ftnb.display.live import Output, has_front_end
from ftnb.display.status import cluster_status, resizing_cluster, starting_cluster
from ftnb.display.table import show
from ftnb.errors import UsageError
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

_LATER = (
    Option("engines", str, "local", "where ranks run: local (ssh and slurm are not available yet)"),
)
_NAME = next(option for option in START_OPTIONS if option.keyword == "name")
COMMAND = Command("ft_cluster", "start | stop [NAME] | status | attach [NAME] | resize -n N: this notebook's cluster",
                  (*START_OPTIONS, *_LATER), positional="ACTION [NAME]")  # fmt: skip
_PLAIN = {
    "stop": Command("ft_cluster stop", "end the training, the ranks and the supervisor: of this notebook's "
                    "cluster, or of the one with that name", (_NAME,), positional="[NAME]"),
    "status": Command("ft_cluster status", "the cluster and its ranks"),
    "attach": Command("ft_cluster attach", "connect to a cluster that runs already (default: 'default')",
                      (_NAME,), positional="[NAME]"),
    "resize": Command("ft_cluster resize", "more ranks, or fewer, from now on, also in the middle of a training",
                      (NUM_RANKS,)),
}  # fmt: skip
_ACTIONS = ("start", *_PLAIN)


def run(line: str) -> Any:
    action, _, rest = line.strip().partition(" ")
    if action in ("--help", "-h", "help"):
        parse(COMMAND, "--help")
        return None
    if action == "start":
        return _start(rest)
    if action not in _PLAIN:
        hint = did_you_mean(action, _ACTIONS)
        trouble = f"has no action {action!r}.{hint}" if action else "needs an action."
        raise UsageError(f"%ft_cluster {trouble} Type %ft_cluster {', '.join(_ACTIONS[:-1])} or {_ACTIONS[-1]}.")
    parsed = parse(_PLAIN[action], rest)
    if parsed.help:
        return None
    if action == "resize":
        return _resize(parsed.get("num_ranks"))
    name = parsed.words[0] if parsed.words else parsed.get("name")
    return {"stop": _stop, "status": _status, "attach": _attach}[action](name)


def _start(rest: str) -> Session | None:
    command = Command("ft_cluster start", "start a cluster", COMMAND.options)
    parsed = parse(command, rest)
    if parsed.help:
        return None
    name = parsed.get("name", "default")
    present = current.session_or_none()
    if present is not None and present.alive and present.name == name:
        print(present.already_runs(parsed.get("num_ranks")))
        return present
    output = Output()
    progress = (lambda status: output.show(starting_cluster(status, name))) if has_front_end() else None
    session = Session.start(**parsed.values, progress=progress)
    return _take(session)


def _attach(name: str | None) -> Session:
    session = _take(Session.attach(name or "default"))
    last = session.run
    if last is not None:
        current.put_in_notebook("run", last)
        current.last_cell = current.last_cell or last.cell
        current.follow(last)
    return session


def _take(session: Session) -> Session:
    before = current.session_or_none()
    if before is not None and before is not session and before.alive:
        print(
            f"The magics work on cluster {session.name!r} now; {before.name!r} goes on. Back to it: %ft_cluster "
            f"attach {before.name}. End it: %ft_cluster stop {before.name}."
        )
    current.bind(session)
    current.activate_px(session)
    return session


def _stop(name: str | None) -> None:
    session = current.session() if name is None else current.session_or_none()
    if session is not None and name in (None, session.name):
        session.stop()
        current.forget(session)
        name = session.name
    else:
        stop_cluster(name)
    print(f"The cluster {name!r} has been stopped.")


def _resize(num_ranks: int | None) -> None:
    session = current.session()
    output = Output()
    progress = (lambda status: output.show(resizing_cluster(status, session.name))) if has_front_end() else None
    session.resize(num_ranks, progress=progress)


def _status(_: str | None) -> None:
    session = current.session()
    show(cluster_status(session.status(), session.name))
