"""Which agents' connections answer: ZeroMQ's own heartbeats, put together from what its monitor and messages tell.

The monitor tells of connections by their file descriptor, messages tell whose a connection is; and a number that has
become free is used again for the next one. Plain data, no sockets.
"""

from __future__ import annotations

AGENT = b"agent-"


class Links:
    """The connections of one listening socket.

    Messages and monitor events come over two queues, so their order has to be thought about. A message that is read
    late may have come over a connection that is closed by now, and whose number belongs to another one. But ZeroMQ
    closes a connection only after it has queued what came over it. So the reading goes in rounds: first all events of
    the monitor, then messages until there are none left. A number that was accepted in this round may still appear in
    messages of the connection that had it before; in the next round it cannot.
    """

    def __init__(self) -> None:
        self._round = 0
        self._accepted: dict[int, int] = {}  # open connections: descriptor → the round in which it was told
        self._owners: dict[int, bytes] = {}  # whose they are, as far as that is known
        self._links: dict[bytes, int] = {}  # each agent's newest connection
        self._down: dict[bytes, float] = {}  # agents without one: since when

    @property
    def wants_descriptors(self) -> bool:
        """Somebody is connected of whom nothing has been read yet. Else the descriptors of messages tell nothing."""
        return len(self._owners) < len(self._accepted)

    def accepted(self, descriptor: int) -> None:
        self._accepted[descriptor] = self._round

    def disconnected(self, descriptor: int, now: float) -> None:
        self._accepted.pop(descriptor, None)
        self._lose(descriptor, now)

    def heard(self, descriptor: int, identity: bytes, now: float) -> None:
        """A message of `identity` has come over this connection."""
        if self._accepted.get(descriptor, self._round) == self._round or self._owners.get(descriptor) == identity:
            return  # closed meanwhile, or perhaps another one's by now; or nothing new
        self._lose(descriptor, now)
        self._owners[descriptor] = identity
        if identity.startswith(AGENT):
            self._links[identity] = descriptor
            self._down.pop(identity, None)

    def all_read(self) -> None:
        """No message is left of those that had come when the monitor's events were read."""
        self._round += 1

    def down_since(self, identity: bytes | None) -> float | None:
        """Since when this agent's connection is gone (monotonic time); None: it is up, or nothing is known."""
        return self._down.get(identity)

    def is_up(self, identity: bytes | None) -> bool | None:
        """Whether the agent's connection answers; None before anything is known of it."""
        return True if identity in self._links else False if identity in self._down else None

    def forget(self, identity: bytes | None) -> None:
        """This process is gone for good."""
        self._links.pop(identity, None)
        self._down.pop(identity, None)

    def _lose(self, descriptor: int, now: float) -> None:
        owner = self._owners.pop(descriptor, None)
        if owner is not None and self._links.get(owner) == descriptor:  # else it has connected again already
            del self._links[owner]
            self._down[owner] = now
