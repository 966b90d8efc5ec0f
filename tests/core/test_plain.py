"""The planner's state as JSON: what comes back is what went in, and nothing else is taken."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftnb.core import keeper, planner
from ftnb.core.plain import from_plain, to_plain


@dataclass(frozen=True)
class Point:
    x: object
    y: object = None
    more: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    start: Point
    stop: Point


CLASSES = {"Point": Point, "Line": Line}
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8))
KEYS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=6
)


def containers(inner):
    several = st.lists(inner, max_size=3)
    points = st.builds(Point, inner, inner, st.dictionaries(st.integers(), inner, max_size=2))
    return several | several.map(tuple) | st.dictionaries(st.deferred(lambda: KEYS), inner, max_size=3) | points


VALUES = st.recursive(st.deferred(lambda: KEYS), containers, max_leaves=12)


def through_json(value):
    return from_plain(json.loads(json.dumps(to_plain(value), allow_nan=False)), CLASSES)


def with_types(value):
    """`value` spelled out so that 1, 1.0 and True, or a list and a tuple, are different."""
    if isinstance(value, dict):
        inside = [(with_types(key), with_types(item)) for key, item in value.items()]
    elif isinstance(value, frozenset):
        inside = sorted(map(repr, map(with_types, value)))
    elif isinstance(value, list | tuple):
        inside = list(map(with_types, value))
    elif isinstance(value, Point):
        inside = [with_types(value.x), with_types(value.y), with_types(value.more)]
    else:
        inside = repr(value)
    return (type(value), inside)


@given(VALUES)
def test_what_comes_back_is_what_went_in(value):
    again = through_json(value)
    assert again == value and with_types(again) == with_types(value)


def test_numbers_that_json_does_not_have():
    again = through_json((math.nan, math.inf, -math.inf, -0.0, {math.inf: 1}))
    assert math.isnan(again[0]) and again[1:3] == (math.inf, -math.inf)
    assert math.copysign(1, again[3]) == -1 and again[4] == {math.inf: 1}


def test_equal_sets_are_written_equally():
    a, b = frozenset([8, 0, 16, 3]), frozenset([3, 16, 0, 8])
    assert json.dumps(to_plain(a)) == json.dumps(to_plain(b))


@pytest.mark.parametrize("value", [{1, 2}, b"x", object(), 1j, range(3), [Point(int)]])
def test_what_could_not_be_read_back_is_not_written(value):
    with pytest.raises(TypeError, match="has no plain form"):
        to_plain(value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"Circle": {}}, "knows no 'Circle'"),
        ({"Point": {"x": 1, "y": 2, "more": {"dict": []}, "z": 3}}, r"unknown fields \['z'\]"),
        ({"Point": {"x": 1, "y": 2}}, r"missing fields \['more'\]"),
        ({"Point": [1, 2]}, "Not written by"),
        ({}, "Not written by"),
        ({"a": 1, "b": 2}, "Not written by"),
        ([{"set": [1]}], "Not written by"),
        ({"tuple": 1}, "Not a list"),
        ({"dict": [[1, 2, 3]]}, "Not a list of pairs"),
        ({"dict": [[[], 2]]}, "Not possible in a dict"),
        ({"dict": [[1, 2], [1, 3]]}, "The same twice"),
        ({"frozenset": [1, 1]}, "The same twice"),
        ({"float": "1.0"}, "Not a number"),
        (math.nan, "Not written by"),
    ],
)
def test_what_is_not_known_is_refused(data, words):
    with pytest.raises(ValueError, match=words):
        from_plain(data, CLASSES)


def test_only_the_classes_that_are_named_are_constructed():
    written = to_plain(Line(Point(1), Point(2)))
    assert from_plain(written, CLASSES) == Line(Point(1), Point(2))
    with pytest.raises(ValueError, match="knows no 'Point'"):
        from_plain(written, {"Line": Line})


def test_the_state_of_a_run():
    state, _ = planner.step(5.0, planner.new(9, refill=True), planner.Started((0, 1)))
    state, _ = planner.step(5.0, state, planner.RankReady(0, 1, 0, None, planner.Failure("user", 1, 2.5, {"a": [1]})))
    again = planner.from_json(planner.to_json(state))
    assert again == state and type(again.members) is tuple and list(again.ready) == [0]


@pytest.mark.parametrize("text", ["", "[]", "null", '{"State": {}}', '{"Incident": {}}', '{"tuple": []}'])
def test_what_is_no_state_of_a_run_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        planner.from_json(text)


def test_what_the_keeper_remembers():
    state = keeper.failed(5.0, keeper.State(), None, "why")
    state, _ = keeper.decide(9.0, state, keeper.Need(frozenset({1}), 1))
    classes = {"State": keeper.State, "Trouble": keeper.Trouble}
    assert from_plain(json.loads(json.dumps(to_plain(state))), classes) == state
