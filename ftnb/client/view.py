"""ipyparallel's view for `%%px`: the ranks, whichever engines they are at the time of each call.

A rank that was replaced may live on in an engine of another number, and warm spares are engines without being ranks.
Imported only when it is needed, because ipyparallel takes a moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ipyparallel import DirectView

if TYPE_CHECKING:
    from ftnb.client.session import Session


class _AllRanks(list):
    """Engine ids of all ranks. As a type of its own, so that putting it back is known from choosing these ids."""


class RankView(DirectView):
    """A view on all living ranks of a cluster; `targets` set to a number, or several, means ranks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._chosen: Any = None
        client = session.client
        super().__init__(client=client, socket=client._mux_socket, targets=_AllRanks())

    @property
    def targets(self) -> Any:
        engines = self._session.wait_registered(self.client)
        if self._chosen is None:
            return _AllRanks(engines.values())
        if isinstance(self._chosen, int):
            return engines.get(self._chosen, self._chosen)
        if isinstance(self._chosen, (list, tuple, range)):
            return [engines.get(rank, rank) for rank in self._chosen]
        return self._chosen

    @targets.setter
    def targets(self, chosen: Any) -> None:
        self._chosen = None if isinstance(chosen, _AllRanks) or chosen in (None, "all") else chosen
