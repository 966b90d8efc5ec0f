"""The rendezvous: keys of the current generation's process group, served to the ranks. Plain data, no sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What to send back, to whom. `ok` False: the generation is over, give up."""

    to: Any
    request_id: int
    ok: bool
    fields: dict[str, Any]


class StoreServer:
    """One generation's keys. A `get` or `wait` for missing keys is kept until they are set."""

    def __init__(self) -> None:
        self.generation = 0
        self._keys: dict[str, bytes] = {}
        self._waiting: list[tuple[Any, dict[str, Any]]] = []
        self._answered: dict[Any, Answer] = {}  # the last answer to each, who may ask again for it

    def open(self, generation: int) -> list[Answer]:
        """Begin with no keys; whoever still waits for the old generation is sent away."""
        refused = [Answer(to, request["id"], False, {}) for to, request in self._waiting]
        self._answered.clear()
        self.generation, self._keys, self._waiting = generation, {}, []
        return refused

    def handle(self, sender: Any, request: dict[str, Any]) -> list[Answer]:
        if request["generation"] != self.generation:
            return [Answer(sender, request["id"], False, {})]
        before = self._answered.get(sender)
        if before is not None and before.request_id == request["id"]:
            return [before]
        if any(to == sender and waiting["id"] == request["id"] for to, waiting in self._waiting):
            return []
        answers = self._handle(sender, request)
        self._answered.update((answer.to, answer) for answer in answers)
        return answers

    def _handle(self, sender: Any, request: dict[str, Any]) -> list[Answer]:
        fields = self._execute(request)
        if fields is None:
            self._waiting.append((sender, request))
            return []
        answers = [Answer(sender, request["id"], True, fields)]
        if request["command"] in ("set", "add", "append", "compare_set"):
            still = []
            for to, waiting in self._waiting:
                ready = self._execute(waiting)
                if ready is None:
                    still.append((to, waiting))
                else:
                    answers.append(Answer(to, waiting["id"], True, ready))
            self._waiting = still
        return answers

    def _execute(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer's fields, or None when it has to wait."""
        command, key = request["command"], request.get("key")
        if command == "set":
            self._keys[key] = request["value"]
            return {}
        if command == "get":
            return {"value": self._keys[key]} if key in self._keys else None
        if command == "wait":
            return {} if all(k in self._keys for k in request["keys"]) else None
        if command == "check":
            return {"number": int(all(k in self._keys for k in request["keys"]))}
        if command == "add":
            number = int(self._keys.get(key, b"0")) + request["amount"]
            self._keys[key] = str(number).encode()
            return {"number": number}
        if command == "append":
            self._keys[key] = self._keys.get(key, b"") + request["value"]
            return {}
        if command == "compare_set":
            current = self._keys.get(key)
            if current == request["expected"] or (current is None and request["expected"] == b""):
                self._keys[key] = request["desired"]
            return {"value": self._keys.get(key, request["expected"])}
        if command == "delete":
            return {"number": int(self._keys.pop(key, None) is not None)}
        if command == "num_keys":
            return {"number": len(self._keys)}
        raise ValueError(f"unknown store command {command!r}")
