"""The last resort: ends a cluster whose supervisor is dead, stopped or hung and has not been replaced.

`python -P -m ftnb.supervisor.guardian --directory D --limit S`: one small process per cluster. Notebooks replace
a lost supervisor and ranks end themselves; neither helps when the kernel is gone as well and the ranks are
stopped or cannot get at the interpreter lock.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ftnb.wire import paths, proc, reaper, records

if TYPE_CHECKING:
    import subprocess

LOOK_EVERY_S = 1.0
# The newest guardian of a cluster writes itself in here; whoever is not named in it any more ends.
OFFICE_NAME = "guardian"
NOTE_STRAYS_EVERY = 10  # looks
_ATTEMPTS = 3


class Patience:
    """Adds up for how long nothing has changed.

    In steps of this process's own looks, none counted as longer than two: whoever was suspended himself (a laptop
    that slept, a whole session that was stopped) has not seen the other one do nothing.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.silent_s = 0.0
        self._last: object = None
        self._looked_at: float | None = None

    def look(self, sign: object, now: float) -> bool:
        """Whether `sign` has stayed the same for the whole limit; `now` on a monotonic clock."""
        if sign != self._last or self._looked_at is None:
            self._last, self.silent_s = sign, 0.0
        else:
            self.silent_s += min(now - self._looked_at, 2 * LOOK_EVERY_S)
        self._looked_at = now
        return self.silent_s >= self.limit_s


def start(directory: Path, limit_s: float, environment: dict[str, str]) -> subprocess.Popen:
    """Start the guardian of the cluster in `directory`, in a session of its own."""
    import subprocess  # the guardian itself does without

    renew_beat(directory)
    home = str(Path(__file__).resolve().parents[2])
    known = environment.get("PYTHONPATH")
    with open(directory / reaper.LOG_NAME, "ab", opener=lambda p, flags: os.open(p, flags, 0o600)) as log:
        return subprocess.Popen(
            # -S: site-packages may run code at start, which costs memory; psutil is not needed where there is /proc.
            [sys.executable, "-P", *(["-S"] if sys.platform == "linux" else []), "-m", "ftnb.supervisor.guardian",
             "--directory", str(directory), "--limit", f"{limit_s:g}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
            env={**environment, "PYTHONPATH": home + (os.pathsep + known if known else "")},
        )  # fmt: skip


def renew_beat(directory: Path) -> None:
    """The supervisor's sign of life, once a second; raises `OSError` when the directory is gone."""
    path = directory / reaper.BEAT_NAME
    try:
        os.utime(path)
    except FileNotFoundError:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def watch(directory: Path, limit_s: float) -> int:
    """Look once a second until the cluster has ended, or has to be ended; returns the exit code."""
    me = proc.identify(os.getpid())
    assert me is not None
    office, beat = directory / OFFICE_NAME, directory / reaper.BEAT_NAME
    mine = f"{me.pid} {me.started}\n"
    patience = Patience(limit_s)
    looks = 0
    try:
        paths.write_private(office, mine)
        while True:
            if office.read_text() != mine:
                return 0  # a newer guardian has taken over
            if patience.look(beat.stat().st_mtime_ns, time.monotonic()):
                break
            looks += 1
            if looks % NOTE_STRAYS_EVERY == 0:
                reaper.note_strays(directory)
            time.sleep(LOOK_EVERY_S)
    except FileNotFoundError:
        return 0  # the cluster was stopped: its directory, or what marks it as living, is gone
    return _end_cluster(directory, limit_s)


def _end_cluster(directory: Path, limit_s: float) -> int:
    beat = directory / reaper.BEAT_NAME
    seen = beat.stat().st_mtime_ns if beat.exists() else None
    found = [recorded for recorded in reaper.living(directory) if recorded.process.pid != os.getpid()]
    what = ", ".join(map(str, found)) or "nothing that is recorded runs any more"
    _say(directory, f"no sign of life of the supervisor for {limit_s:g} s and no successor; ending the cluster: {what}")
    left: list[records.Recorded] = []
    for _ in range(_ATTEMPTS):
        left = reaper.reap(directory, give_way=True)
        if not beat.exists():
            return 0
        if not left and beat.stat().st_mtime_ns != seen:
            _say(directory, "a successor has taken over meanwhile; it has a guardian of its own")
            return 0
    _say(directory, f"could not be ended: {', '.join(map(str, left)) or 'another process holds the lock'}")
    return 1


def _say(directory: Path, text: str) -> None:
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} ftnb.guardian WARNING {text}\n"
    try:
        fd = os.open(directory / reaper.LOG_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:
        return
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def main(arguments: list[str]) -> int:
    # Read by hand: argparse alone takes a megabyte, for as long as the cluster lives.
    given = dict(zip(arguments[::2], arguments[1::2]))
    try:
        directory, limit_s = Path(given["--directory"]), float(given["--limit"])
    except (KeyError, ValueError):
        print("usage: python -m ftnb.supervisor.guardian --directory D --limit SECONDS", file=sys.stderr)
        return 2
    return watch(directory, limit_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
