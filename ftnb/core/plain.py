"""The planner's state as JSON, so that the next supervisor can go on with it.

What comes back is equal to what went in, type by type: a tuple stays a tuple, 1.0 stays a float, the keys of a
dict stay numbers. Reading constructs nothing but the dataclasses that the reader names, and refuses whatever it
does not know, missing fields included: a supervisor of another version has to notice, and must not guess.

How it is written: `null`, text, numbers, `true`, `false` and lists stand for themselves; everything else is an object
with a single key that tells the type, `{"tuple": […]}`, `{"frozenset": […]}`, `{"dict": [[key, value], …]}`,
`{"float": "nan"}`; a dataclass is `{"its name": {field: value}}`, with a capital letter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def to_plain(value: Any) -> Any:
    """`value` in types that `json.dumps(…, allow_nan=False)` takes; TypeError for what could not be read back."""
    kind = type(value)
    if value is None or kind in (str, int, bool):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is list:
        return [to_plain(item) for item in value]
    if kind is tuple:
        return {"tuple": [to_plain(item) for item in value]}
    if kind is frozenset:
        # In an order of its own, so that equal states are equal files.
        return {"frozenset": sorted((to_plain(item) for item in value), key=json.dumps)}
    if kind is dict:
        return {"dict": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    if is_dataclass(kind) and kind.__name__[0].isupper():
        return {kind.__name__: {field.name: to_plain(getattr(value, field.name)) for field in fields(kind)}}
    raise TypeError(f"A value of type {kind.__module__}.{kind.__qualname__} has no plain form: {value!r:.100}")


def from_plain(data: Any, classes: Mapping[str, type]) -> Any:
    """What `to_plain` was given. ValueError for anything that it does not write, or that `classes` lacks."""
    if data is None or type(data) in (str, int, bool):
        return data
    if type(data) is float and math.isfinite(data):
        return data
    if type(data) is list:
        return [from_plain(item, classes) for item in data]
    if type(data) is dict and len(data) == 1:
        ((name, content),) = data.items()
        if name in _READERS:
            return _READERS[name](content, classes)
        if type(content) is dict:
            return _dataclass(name, content, classes)
    raise ValueError(f"Not written by this version of ftnb: {data!r:.100}")


def _dataclass(name: str, content: dict[str, Any], classes: Mapping[str, type]) -> Any:
    if name not in classes:
        raise ValueError(f"This version of ftnb knows no {name!r}.")
    expected = {field.name for field in fields(classes[name])}
    if content.keys() != expected:
        unknown, missing = sorted(content.keys() - expected), sorted(expected - content.keys())
        raise ValueError(f"{name} of another version of ftnb: unknown fields {unknown}, missing fields {missing}.")
    return classes[name](**{field: from_plain(item, classes) for field, item in content.items()})


def _items(content: Any, classes: Mapping[str, type]) -> list[Any]:
    if type(content) is not list:
        raise ValueError(f"Not a list: {content!r:.100}")
    return [from_plain(item, classes) for item in content]


def _tuple(content: Any, classes: Mapping[str, type]) -> tuple[Any, ...]:
    return tuple(_items(content, classes))


def _frozenset(content: Any, classes: Mapping[str, type]) -> frozenset[Any]:
    items = _items(content, classes)
    return _without_doubles(frozenset, items, len(items))


def _dict(content: Any, classes: Mapping[str, type]) -> dict[Any, Any]:
    pairs = _items(content, classes)
    if not all(type(pair) is list and len(pair) == 2 for pair in pairs):
        raise ValueError(f"Not a list of pairs: {content!r:.100}")
    return _without_doubles(dict, pairs, len(pairs))


def _without_doubles(kind: type, items: list[Any], expected: int) -> Any:
    try:
        value = kind(items)
    except TypeError as error:
        raise ValueError(f"Not possible in a {kind.__name__}: {error}") from None
    if len(value) != expected:
        raise ValueError(f"The same twice in a {kind.__name__}: {items!r:.100}")
    return value


def _float(content: Any, classes: Mapping[str, type]) -> float:
    if type(content) is not str or content not in ("nan", "inf", "-inf"):
        raise ValueError(f"Not a number: {content!r:.100}")
    return float(content)


_READERS: dict[str, Callable[[Any, Mapping[str, type]], Any]] = {
    "tuple": _tuple,
    "frozenset": _frozenset,
    "dict": _dict,
    "float": _float,
}
