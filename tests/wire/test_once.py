"""A request is done once, however often it arrives."""

from __future__ import annotations

from ftnb.wire import once


def test_a_request_that_comes_again_gets_the_same_answer() -> None:
    known = once.OnceOnly()
    assert known.is_new(b"a", 1) and not known.is_new(b"a", 1)
    assert known.answer(b"a", 1) is None  # still being worked on
    assert known.is_new(b"b", 1) and known.is_new(b"a", 2)  # another client, another request
    assert known.answered(b"a", 1, {"ok": True}) == {"ok": True, "once": True}
    assert not known.is_new(b"a", 1) and known.answer(b"a", 1) == {"ok": True, "once": True}


def test_without_a_number_each_is_new() -> None:
    known = once.OnceOnly()
    assert known.is_new(b"a", 0) and known.is_new(b"a", 0) and known.is_new(b"a", None)
    known.answered(b"a", 0, {})
    assert known.is_new(b"a", 0)


def test_old_answers_are_forgotten_and_open_requests_are_not() -> None:
    known = once.OnceOnly()
    known.is_new(b"a", 1)
    for number in range(2, 5 * once._KEPT):
        assert known.is_new(b"a", number)
        known.answered(b"a", number, {})
    assert len(known._answers) <= 2 * once._KEPT + 1
    assert not known.is_new(b"a", 1) and known.is_new(b"a", 2)
    assert known.answer(b"a", 5 * once._KEPT - 1) is not None
