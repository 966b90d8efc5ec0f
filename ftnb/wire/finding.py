"""Which clusters there are: their connection files, and whether the supervisors that these name still run."""

from __future__ import annotations

import contextlib
import os

from ftnb.errors import NoClusterError
from ftnb.wire import paths, proc, sockets


class DeadCluster(NoClusterError):
    """A connection file is there, but the supervisor that it names is gone."""

    def __init__(self, connection: sockets.Connection) -> None:
        super().__init__(
            f"The cluster {connection.name!r} is gone (its supervisor, pid {connection.pid}, no longer runs). "
            "Start a new one with %ft_cluster start."
        )
        self.connection = connection


def trusted(name: str) -> sockets.Connection:
    """The connection file of `name`; raises `NoClusterError` when there is none, or one that cannot be trusted."""
    path = paths.connection_file(name)
    try:
        owner = path.stat().st_uid
        connection = sockets.Connection.load(path)
    except (FileNotFoundError, NotADirectoryError):
        others = [other for other in running_clusters() if other != name]
        raise NoClusterError(
            f"No cluster named {name!r} is running. Start one with %ft_cluster start"
            + ("" if name == "default" else f" --name {name}")
            + " (in Python: ftnb.Session.start())."
            + (f" Running: {', '.join(others)} (%ft_cluster attach NAME)." if others else "")
        ) from None
    except PermissionError:
        raise NoClusterError(
            f"The connection file {path} belongs to another user; ftnb only talks to your own clusters."
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise NoClusterError(
            f"The connection file {path} is damaged ({error}). Remove it, then type %ft_cluster start."
        ) from None
    if owner != os.getuid():
        raise NoClusterError(f"The connection file {path} belongs to another user; it is not trusted.")
    return connection


def running_clusters() -> list[str]:
    """The names of this user's clusters that have a living supervisor."""
    found = []
    for path in sorted((paths.runtime_dir() / "clusters").glob("*/connection.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            if path.stat().st_uid == os.getuid() and is_alive(sockets.Connection.load(path)):
                found.append(path.parent.name)
    return found


def is_alive(connection: sockets.Connection) -> bool:
    return proc.ProcessId(connection.pid, connection.pid_started).is_alive()


def load(name: str) -> sockets.Connection:
    """The connection of the living cluster `name`; raises `NoClusterError` when there is none."""
    connection = trusted(name)
    if not is_alive(connection):
        raise DeadCluster(connection)
    return connection
