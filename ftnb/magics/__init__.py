"""The magics: they parse and route, nothing more. One small file per command."""

from __future__ import annotations

from typing import Any

from ftnb.magics import (
    ft_chaos,
    ft_cluster,
    ft_events,
    ft_inject,
    ft_logs,
    ft_pause,
    ft_report,
    ft_stacks,
    ft_status,
    ft_stop,
    ft_train,
    ft_unpause,
    ft_wait,
)

COMMANDS = (
    ft_cluster, ft_train, ft_status, ft_wait, ft_pause, ft_unpause, ft_stop, ft_inject, ft_chaos, ft_events,
    ft_report, ft_logs, ft_stacks,
)  # fmt: skip


def register(ipython: Any) -> None:
    """Make all magics known to `ipython`; loading the extension twice changes nothing."""
    for module in COMMANDS:
        ipython.register_magic_function(
            module.run, getattr(module, "MAGIC_KIND", "line"), module.COMMAND.name
        )
