"""Whose connection is up, whatever the order in which monitor and messages are read."""

from __future__ import annotations

from ftnb.supervisor.links import Links

A, B, WORK = b"agent-1", b"agent-2", b"work-1"


def connected(links: Links, *connections: tuple[int, bytes]) -> Links:
    for descriptor, _ in connections:
        links.accepted(descriptor)
    links.all_read()
    for descriptor, identity in connections:
        links.heard(descriptor, identity, 0.0)
    links.all_read()
    return links


def test_nothing_is_known_before_a_message() -> None:
    links = Links()
    assert links.is_up(A) is None and not links.wants_descriptors
    links.accepted(10)
    assert links.is_up(A) is None and links.wants_descriptors
    links.all_read()
    links.heard(10, A, 1.0)
    assert links.is_up(A) is True and not links.wants_descriptors
    links.disconnected(10, 2.0)
    assert links.is_up(A) is False and links.down_since(A) == 2.0


def test_a_late_message_does_not_bring_a_closed_connection_back() -> None:
    links = connected(Links(), (10, A))
    links.disconnected(10, 2.0)
    links.heard(10, A, 2.1)
    links.all_read()
    links.heard(10, A, 2.2)
    assert links.is_up(A) is False and links.down_since(A) == 2.0


def test_a_late_message_of_the_connection_that_had_the_number_before() -> None:
    links = connected(Links(), (10, A))
    links.disconnected(10, 2.0)
    links.accepted(10)  # that of B, read from the monitor before the last message of A
    links.heard(10, A, 2.1)
    assert links.is_up(A) is False
    links.all_read()
    links.heard(10, B, 2.2)
    assert links.is_up(A) is False and links.is_up(B) is True
    links.disconnected(10, 3.0)
    assert links.down_since(A) == 2.0 and links.down_since(B) == 3.0


def test_who_connects_again_is_up_whichever_end_is_told_last() -> None:
    links = connected(Links(), (10, A))
    links.accepted(11)
    links.all_read()
    links.heard(11, A, 2.0)
    links.disconnected(10, 2.5)  # of the old connection
    assert links.is_up(A) is True
    links.disconnected(11, 3.0)
    assert links.is_up(A) is False and links.down_since(A) == 3.0


def test_the_work_link_of_a_training_thread_does_not_count() -> None:
    links = connected(Links(), (10, A), (11, WORK))
    assert not links.wants_descriptors
    links.disconnected(11, 2.0)
    assert links.is_up(A) is True and links.is_up(WORK) is None
    links.disconnected(10, 3.0)
    connected(links, (12, WORK))
    assert links.is_up(A) is False


def test_the_dead_are_forgotten() -> None:
    links = connected(Links(), (10, A), (11, B))
    links.disconnected(10, 2.0)
    links.forget(A)
    links.forget(B)
    links.disconnected(11, 3.0)
    assert links.is_up(A) is None and links.down_since(B) is None
