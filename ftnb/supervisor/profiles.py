"""Clusters after an IPython profile of the user: where it lies, and the launcher it names for engines.

Importing ipyparallel takes a tenth of a second, so this module is loaded only when there is a profile.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ipyparallel import util
from ipyparallel.cluster.cluster import Cluster
from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalEngineSetLauncher, ipengine_cmd_argv

from ftnb.errors import ClusterError

log = logging.getLogger("ftnb.profiles")

ENGINE_MODULE = "ftnb.rank.engine"


class Profile:
    """What the configuration (`ipcluster_config.py`) of an IPython profile says about starting a cluster."""

    def __init__(self, name: str, cluster_id: str) -> None:
        home = util.get_ipython_dir()
        try:  # asking `Cluster` for a profile that is not there would make one
            self.directory = Path(util.ProfileDir.find_profile_dir_by_name(home, name).location)
        except util.ProfileDirError:
            raise ClusterError(
                f"There is no IPython profile {name!r} in {home}. `ipython profile list` shows those that exist; "
                f"`ipython profile create {name} --parallel` makes one. Or leave --profile out."
            ) from None
        try:
            self._cluster = Cluster(
                profile_dir=str(self.directory), cluster_id=cluster_id, cluster_file="", shutdown_atexit=False,
                send_engines_connection_env=False, log_level=logging.WARNING, parent=None,
            )
        except Exception as error:  # the profile's own code runs here: anything can come out of it
            raise ClusterError(
                f"The IPython profile {name!r} could not be loaded: {type(error).__name__}: {error}. Mend "
                f"{self.directory / 'ipcluster_config.py'}, or leave --profile out."
            ) from None
        if self._cluster.controller_launcher_class is not LocalControllerLauncher:
            raise ClusterError(
                f"The profile {name!r} starts the controller by {self._cluster.controller_launcher_class.__name__}. "
                "ftnb starts it itself, on this machine: take `controller_launcher_class` out of "
                f"{self.directory / 'ipcluster_config.py'}."
            )
        self.name = name
        self._class = self._cluster.engine_launcher_class
        example = self._class(parent=self._cluster)  # to see what is configured
        self._command = [
            ENGINE_MODULE if word == "ipyparallel.engine" else word
            for word in getattr(example, "engine_cmd", ipengine_cmd_argv)
        ]
        self._args = list(getattr(example, "engine_args", []))
        self._environment = dict(example.environment)
        usual = [sys.executable, "-m", ENGINE_MODULE]
        # A launcher of its own, or only another command: the profile's business, so the fork server is not used.
        self.has_launcher = self._class is not LocalEngineSetLauncher or self._command != usual
        self.controller_args = [f"--ip={self._cluster.controller_ip or '127.0.0.1'}", *self._cluster.controller_args]

    async def start_engine(
        self, key: str, args: list[str], environment: dict[str, str], on_stop: Callable[[int | None], None]
    ) -> None:
        """Start one engine by the profile's launcher; `on_stop(exit code)` when the launcher says that it has ended."""
        self._cluster.engines.pop(key, None)
        more: dict[str, Any] = {}
        if "batch_file_name" in self._class.class_trait_names():
            more["batch_file_name"] = f"ftnb-{key}.batch"  # or all ranks would write the same file
        try:
            await self._cluster.start_engines(
                n=1, engine_set_id=key, engine_cmd=self._command, engine_args=[*self._args, *args],
                environment={**self._environment, **environment}, **more,
            )
        except Exception as error:  # whatever a launcher raises: no such command, a refused job, …
            raise ClusterError(
                f"The profile {self.name!r} could not start {key}: its launcher {self._class.__name__} raised "
                f"{type(error).__name__}: {error}\n{self.output_of(key)}".rstrip()
            ) from None
        self._cluster.engines[key].on_stop(lambda data: on_stop((data or {}).get("exit_code")))

    def output_of(self, key: str, chars: int = 2000) -> str:
        """The end of what the launcher's command has printed."""
        launcher = self._cluster.engines.get(key)
        if launcher is None:
            return ""
        try:
            return launcher.get_output()[-chars:]
        except Exception as error:  # some launchers have none before they have started anything
            log.info("no output of %s: %s", key, error)
            return ""

    def waited_for(self) -> set[int]:
        """Pids for whose exit status the launchers wait themselves."""
        pids = set()
        for launcher in self._cluster.engines.values():
            for one in [launcher, *getattr(launcher, "launchers", {}).values()]:
                pids.add(getattr(one, "pid", -1))
        return pids - {-1}
