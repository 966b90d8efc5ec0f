"""A cluster as the notebook sees it: `Session.start()`, `session.train(...)`, `session.stop()`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ftnb.client import container, ending, launch
from ftnb.client.names import check_syntax, pack
from ftnb.client.options import Option, check_train_options, refuse_unknown
from ftnb.client.resize import resize
from ftnb.client.run import ENDED, Run, WaitInterrupted
from ftnb.client.source import cell_text
from ftnb.errors import ClusterError, NoClusterError, RunError, UsageError
from ftnb.wire import paths
from ftnb.wire.client import ClientConnection

if TYPE_CHECKING:
    import ipyparallel

START_OPTIONS = (
    Option("num_ranks", int, None, "number of ranks (4, fewer where memory or cores are small)",
           flag="--num-ranks", short="-n", minimum=1),
    Option("num_spares", int, 0, "warm spares, which take the place of a lost rank at once",
           flag="--spares", minimum=0),
    Option("name", str, "default", "name of the cluster", check=lambda _, value: paths.check_name(value)),
    Option("profile", str, None, "IPython profile of the engines"),
    Option("backend", str, "auto", "communication of the ranks", choices=("auto", "gloo", "nccl")),
    Option("threads", int, None, "threads per rank (cores / ranks when left out)", minimum=1),
    Option("linger_s", float, 60.0, "seconds that the cluster outlives its last notebook", flag="--linger",
           minimum=0),
    Option("keep", bool, False, "the cluster stays until it is stopped"),
)  # fmt: skip

_FRESH_S = 1.0  # a number of ranks that is younger is not asked for again

# The sessions of this process, so that starting the same cluster twice gives the same session.
_sessions: dict[str, Session] = {}
_sessions_lock = threading.Lock()


# States of a rank in which it can be looked into with `%%px`.
_AT_WORK = ("idle", "training", "suspect")


class Session:
    """A connection to a cluster. Also a context manager, which stops the cluster at its end."""

    def __init__(self, connection: ClientConnection, process: subprocess.Popen | None = None) -> None:
        self._connection = connection
        self._process = process
        self._client: ipyparallel.Client | None = None
        self._lock = threading.RLock()
        self._stopped = False
        self._num_ranks, self._num_ranks_at = 0, 0.0
        try:
            # Long enough for a supervisor that hangs to be replaced meanwhile.
            self.hello = self.request("hello", timeout_s=60)
        except BaseException:
            connection.close()  # or it would keep the cluster, of which nobody has a session, alive
            raise
        self.name: str = self.hello["name"]

    # Start and end

    @classmethod
    def start(
        cls,
        num_ranks: int | None = None,
        num_spares: int = 0,
        name: str = "default",
        profile: str | None = None,
        engines: str = "local",
        backend: str = "auto",
        threads: int | None = None,
        linger_s: float = 60.0,
        keep: bool = False,
        *,
        progress: launch.Progress | None = None,
        show: Callable[[str], None] = print,
        **others: Any,
    ) -> Session:
        """Start a cluster and return once every rank has answered (4 ranks, fewer in a small container).

        `progress` is called with the cluster's status while it starts; `show` prints what there is to say.
        """
        known = (*(option.keyword for option in START_OPTIONS), "engines", "progress", "show")
        refuse_unknown("Session.start", others, known)
        given = {"num_ranks": num_ranks, "num_spares": num_spares, "name": name, "profile": profile, "backend": backend,
                 "threads": threads, "linger_s": linger_s, "keep": keep}  # fmt: skip
        checked = {option.keyword: option.checked(given[option.keyword]) for option in START_OPTIONS}
        _refuse_later(engines)
        name, num_spares = checked["name"], checked["num_spares"]
        existing = _living(checked["name"])
        if existing is not None:
            show(existing.already_runs(num_ranks))
            return existing
        if launch.running(name):
            raise ClusterError(
                f"A cluster named {name!r} is running already, started from elsewhere or before this kernel was "
                f"restarted. Use it: %ft_cluster attach {name} (in Python: Session.attach({name!r})), or end it: "
                f"%ft_cluster stop {name} (Session.attach({name!r}).stop()). It ends by itself when no notebook "
                "has been connected to it for its linger time (60 s, unless it was started with --linger or "
                "--keep). A second one beside it: %ft_cluster start --name NAME (Session.start(name=NAME))."
            )
        ending.clear_remains(name)
        room = container.look()
        if num_ranks is None:
            checked["num_ranks"] = container.default_num_ranks(room, num_spares)
        if num_ranks is not None or num_spares:
            container.refuse_more_than_fit(room, checked["num_ranks"], num_spares)
        if threads is None:
            checked["threads"] = container.default_threads(room, checked["num_ranks"])
        connection, process = launch.start(launch.Plan(**checked), progress or _Printed(show))
        return _register(cls(connection, process))

    @classmethod
    def attach(cls, name: str = "default", *, show: Callable[[str], None] = print) -> Session:
        """Connect to a cluster that runs already, for instance after a restart of the kernel.

        Where the supervisor is dead, but ranks live, a successor is started, which takes them over.
        """
        paths.check_name(name)
        return _living(name) or _register(cls(launch.attach(name, show)))

    def stop(self) -> None:
        """End the training, the ranks and the supervisor; returns when they are gone. Harmless twice.

        What does not listen (a supervisor that is dead, stopped or hung) is ended by force.
        """
        with self._lock:
            if self._stopped:
                return
            if self._client is not None:
                with contextlib.suppress(Exception):  # its sockets may have gone first
                    self._client.close()
                self._client = None
            ending.stop(self._connection, self._process)
            self._stopped = True
        with _sessions_lock:
            if _sessions.get(self.name) is self:
                del _sessions[self.name]

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Session({self.name!r}, num_ranks={self._num_ranks})"

    def __reduce__(self) -> Any:
        raise TypeError("a Session belongs to the notebook and cannot be sent elsewhere")

    @property
    def alive(self) -> bool:
        return not self._stopped and self._connection.usable

    def already_runs(self, wanted: int | None = None) -> str:
        ranks = _count(self.num_ranks)
        text = f"The cluster {self.name!r} runs already, with {ranks}; this is the same one."
        if wanted is not None and wanted != self.num_ranks:
            text += (
                f" For {_count(wanted)}, stop it first: %ft_cluster stop (in Python: session.stop()), or give the "
                "new one another name: --name NAME (name=NAME)."
            )
        return text

    # Questions

    def request(self, op: str, timeout_s: float | None = 30.0, **args: Any) -> dict[str, Any]:
        if self._stopped:
            raise NoClusterError(
                f"The cluster {self.name!r} has been stopped. Start one with %ft_cluster start "
                "(in Python: Session.start())."
            )
        result = self._connection.request(op, timeout_s=timeout_s, **args)
        if op in ("hello", "status"):
            self._num_ranks, self._num_ranks_at = result.get("num_ranks", self._num_ranks), time.monotonic()
        return result

    @property
    def num_ranks(self) -> int:
        """How many ranks the cluster is to have; it may be resized, by another notebook, too."""
        if not self._stopped and time.monotonic() - self._num_ranks_at > _FRESH_S:
            with contextlib.suppress(ClusterError, NoClusterError):  # then the last that was heard
                self.request("status", timeout_s=2)
            self._num_ranks_at = time.monotonic()
        return self._num_ranks

    def resize(
        self, num_ranks: int, *, progress: launch.Progress | None = None, show: Callable[[str], None] = print
    ) -> None:
        """Give the cluster more ranks or fewer, also while it trains; returns once all of them work.

        Interrupting (Ctrl-C) ends the waiting, not the resizing.
        """
        resize(self, num_ranks, progress, show)

    def status(self) -> dict[str, Any]:
        """The cluster's state as a plain dict, with one entry in `ranks` per rank."""
        return self.request("status")

    @property
    def client(self) -> ipyparallel.Client:
        """An `ipyparallel.Client` of the same ranks, connected on first use.

        A rank that has just been started, or has just joined, is waited for: it trains before ipyparallel knows it.
        """
        with self._lock:
            if self._client is None:
                path = self.request("hello")["ipp_file"]
                import ipyparallel

                self._client = ipyparallel.Client(str(path))
            self.wait_registered(self._client)
            return self._client

    def wait_registered(self, client: ipyparallel.Client, limit_s: float = 5.0) -> dict[int, int]:
        """Wait until ipyparallel knows all ranks (they train before it does); returns {rank: engine id} of those."""
        deadline = time.monotonic() + limit_s
        while True:
            engines = {
                entry["rank"]: entry["engine"] for entry in self.status()["ranks"]
                if entry["rank"] is not None and entry["state"] in _AT_WORK
            }  # fmt: skip
            known = set(client.ids)
            if known.issuperset(engines.values()) or time.monotonic() > deadline:
                return {rank: engines[rank] for rank in sorted(engines) if engines[rank] in known}
            time.sleep(0.02)

    @property
    def run(self) -> Run | None:
        """The current or last run; None before the first one."""
        try:
            info = self.request("run_info", run=None)
        except RunError:
            return None
        return Run(self, info["run"], info["directory"]) if info.get("run") else None

    # Training

    def train(
        self,
        cell: str | Callable[[], Any],
        *,
        names: dict[str, Any] | None = None,
        show: Callable[[str], None] = print,
        **options: Any,
    ) -> Run:
        """Run `cell` (text, or a function whose body is meant) on every rank and train what it defines.

        Returns once all ranks have passed the checks; the training goes on in the background (`wait=True`
        blocks until its end). `names` is where the cell's other names come from: the notebook's own.
        """
        options = check_train_options(options)
        wait = options.pop("wait")
        source, names = cell_text(cell, notebook_names() if names is None else names)
        check_syntax(source)
        if options["global_batch"] < self.num_ranks:
            raise UsageError(
                f"global_batch {options['global_batch']} is smaller than the number of ranks "
                f"({self.num_ranks}): some would never get a sample. Use at least {self.num_ranks}."
            )
        self._refuse_second_run()
        parcel = pack(source, names)
        try:
            result = self.request(
                "train", timeout_s=None, cell=source, names=parcel.pickled, options=options,
                cwd=os.getcwd(), sys_path=_sys_path(),
            )  # fmt: skip
        except KeyboardInterrupt:
            raise self._interrupted() from None
        for line in result_lines(result, self.num_ranks):
            show(line)
        run = Run(self, result["run"], result["directory"])
        if wait:
            run.wait()
        return run

    def _refuse_second_run(self) -> None:
        """Before anything is packed and sent; the supervisor checks again."""
        run = self.run
        if run is not None and (state := run.state) not in ENDED:
            raise RunError(
                f"Run {run.name!r} is still {state} on this cluster. Wait for it: %ft_wait (in Python: "
                "run.wait()), end it: %ft_stop (run.stop()), or start a second cluster: %ft_cluster start "
                "--name NAME (Session.start(name=NAME))."
            )

    def _interrupted(self) -> WaitInterrupted:
        """Ctrl-C while the ranks run the cell: nothing trains yet, so the attempt is called off."""
        try:
            run = self.run
            if run is not None and run.state == "starting":
                run.stop(save=False)
                return WaitInterrupted(f"run {run.name!r} was called off before its training began.")
            if run is not None and run.state not in ENDED:
                text = f"run {run.name!r} has begun and goes on; end it with %ft_stop (in Python: run.stop())."
                return WaitInterrupted(text)
        except (ClusterError, NoClusterError, RunError) as error:
            return WaitInterrupted(f"the training could not be called off: {error}")
        with contextlib.suppress(RunError):  # no rank was running the cell any more
            self.request("stop_run")
        return WaitInterrupted("the training had not begun and was called off.")


def result_lines(result: dict[str, Any], num_ranks: int) -> Iterable[str]:
    """What the ranks printed while they ran the cell, each text once, and the supervisor's notes."""
    for ranks, text in result.get("output") or []:
        everyone = len(ranks) == num_ranks and num_ranks > 1
        who = "all ranks" if everyone else ("rank " if len(ranks) == 1 else "ranks ") + _numbers(ranks)
        yield from (f"[{who}] {line}" for line in text.rstrip("\n").splitlines())
    for note in result.get("notes") or []:
        yield f"Note: {note}"


def notebook_names() -> dict[str, Any]:
    """The names of the notebook, or of the main script outside IPython."""
    if "IPython" in sys.modules:
        from IPython import get_ipython

        if (shell := get_ipython()) is not None:
            return shell.user_ns
    return vars(sys.modules["__main__"])


def _sys_path() -> list[str]:
    """As text: `sys.path` may hold `pathlib.Path` objects (which Python itself passes over) and worse."""
    return [os.fsdecode(entry) for entry in sys.path if isinstance(entry, (str, bytes, os.PathLike))]


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _numbers(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


def _refuse_later(engines: str) -> None:
    if engines != "local":
        raise UsageError(f"--engines {engines}: only local engines are available yet.")


def stop_cluster(name: str = "default") -> None:
    """End the cluster `name`, in whatever state it is: running, hung, or without a supervisor."""
    paths.check_name(name)
    if (session := _living(name)) is not None:
        session.stop()
    else:
        ending.stop_by_name(name)


def _living(name: str) -> Session | None:
    with _sessions_lock:
        session = _sessions.get(name)
        if session is not None and not session.alive:
            del _sessions[name]
            return None
        return session


def _register(session: Session) -> Session:
    with _sessions_lock:
        _sessions[session.name] = session
    return session


class _Printed:
    """Progress as a few plain lines, for scripts."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.answered = -1

    def __call__(self, status: dict[str, Any]) -> None:
        ranks = [entry for entry in status["ranks"] if entry["rank"] is not None]
        answered = sum(entry["state"] not in ("starting", "failed") for entry in ranks)
        if answered != self.answered:
            self.answered = answered
            self.show(
                f"Starting the cluster: {answered} of {status['num_ranks']} ranks ready "
                f"({status['elapsed_s']:.1f} s)"
            )
