"""Numbered messages over a line that loses, repeats and mixes up: all are heard, once, in order."""

from __future__ import annotations

import random

import pytest

from ftnb.wire.letters import AGAIN_S, BYTES_PER_S, NUM_KEPT, PASSING, Received, Sent


def test_what_passes_has_no_number() -> None:
    sent, received = Sent("work"), Received()
    for op in PASSING:
        message = sent.numbered({"op": op}, 0.0)
        assert "letter" not in message and received.is_next(message)
    assert sent.last == 0 and received.heard == 0


def test_each_is_heard_once_and_in_turn() -> None:
    sent, received = Sent("work"), Received()
    one, two, three = (sent.numbered({"op": "ready", "n": n}, 0.0) for n in (1, 2, 3))
    assert received.is_next(one) and not received.is_next(one)
    assert not received.is_next(three), "the second is missing"
    again = sent.again(received.heard)
    assert [message["n"] for message in again] == [2, 3]
    assert all(received.is_next(message) for message in again)
    assert not received.is_next(two) and received.heard == 3 and sent.again(3) == []


def test_what_may_be_on_its_way_is_not_sent_again() -> None:
    sent = Sent("orders")
    sent.numbered({"op": "go"}, 10.0)
    assert sent.again(0, 10.1) == []
    assert len(sent.again(0, 10.0 + AGAIN_S)) == 1
    assert sent.again(0, 10.1 + AGAIN_S) == [], "it has just been sent again"


def test_what_is_large_is_given_time_to_arrive() -> None:
    sent, seconds = Sent("orders"), 2.0
    sent.numbered({"op": "load", "names": bytes(int(seconds * BYTES_PER_S))}, 10.0)
    assert sent.again(0, 10.0 + seconds) == []
    assert len(sent.again(0, 10.0 + seconds + AGAIN_S)) == 1


def test_what_has_arrived_is_not_kept() -> None:
    sent = Sent("orders")
    assert not sent.keeps_any
    sent.numbered({"op": "load", "names": b"many megabytes"}, 10.0)
    assert sent.keeps_any
    sent.arrived(1)
    assert not sent.keeps_any


def test_what_is_missing_is_asked_for_when_it_does_not_come() -> None:
    received = Received()
    assert not received.lacks(0, 1.0) and not received.lacks(2, 1.0)
    assert not received.lacks(2, 1.1), "it may be on its way"
    assert received.lacks(2, 1.0 + AGAIN_S) and not received.lacks(2, 1.1 + AGAIN_S)
    received.heard = 1
    assert not received.lacks(2, 1.2 + AGAIN_S), "something has come meanwhile"


def test_a_successor_begins_with_whatever_comes_first() -> None:
    sent, received = Sent("work"), Received(None)
    for n in range(5):
        message = sent.numbered({"op": "held", "n": n}, 0.0)
    assert not received.lacks(5, 9.0)
    assert received.is_next(message) and received.heard == 5


def test_what_is_no_longer_kept_does_not_stop_the_rest() -> None:
    sent, received = Sent("work"), Received()
    for n in range(1, NUM_KEPT + 11):
        sent.numbered({"op": "held", "n": n}, 0.0)
    heard = [message["n"] for message in sent.again(received.heard) if received.is_next(message)]
    assert heard == list(range(11, NUM_KEPT + 11))


@pytest.mark.parametrize("seed", range(50))
def test_a_bad_line(seed: int) -> None:
    dice = random.Random(seed)
    sent, received = Sent("orders"), Received()
    line: list[dict] = []
    heard: list[int] = []
    now, n = 0.0, 0
    while n < 30 or len(heard) < 30:
        now += 0.1
        if n < 30 and dice.random() < 0.5:
            n += 1
            line.append(sent.numbered({"op": "go", "n": n}, now))
        if dice.random() < 0.3:
            line = []  # the connection breaks
        if dice.random() < 0.2 and line:
            line.append(dice.choice(line))
        for _ in range(dice.randrange(3)):
            if line and received.is_next(message := line.pop(0)):
                heard.append(message["n"])
        if dice.random() < 0.7:  # a heartbeat
            line += sent.again(received.heard, now)
        assert now < 1000
    assert heard == list(range(1, 31))
