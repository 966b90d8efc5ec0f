"""What a cell takes along from the notebook."""

from __future__ import annotations

import builtins
import pickle
import subprocess
import sys
import threading
import types
import xml.etree.ElementTree

import numpy as np
import pytest

from ftnb.client.names import check_syntax, names_read, pack
from ftnb.errors import CellError, UsageError


@pytest.mark.parametrize(
    "source, names",
    [
        ("y = x + 1", {"x"}),
        ("x = 1\ny = x", set()),
        ("x = x + 1", {"x"}),
        ("x += 1", {"x"}),
        ("def f(a, b=c):\n    local = a + scale\n    return local", {"c", "scale"}),
        ("def f():\n    return later\nlater = 1", set()),
        ("def f():\n    global count\n    count += 1", {"count"}),
        ("class A(Base):\n    size = width\n    def go(self): return call(self)", {"Base", "width", "call"}),
        ("ys = [g(x) for x in xs if x > low]", {"g", "xs", "low"}),
        ("f = lambda a: a + b", {"b"}),
        ("import torch\nfrom torch import nn as n\nm = n.Linear(torch.tensor(1), k)", {"k"}),
        ("if flag:\n    z = 1\nprint(z)", {"flag", "z"}),
        ("if flag:\n    z = 1\nelse:\n    z = 2\nz", {"flag"}),
        ("for i in items:\n    last = i\n", {"items"}),
        ("with opener() as f, lock:\n    data = f.read()\ndata", {"opener", "lock"}),
        ("try:\n    import fast\nexcept ImportError as e:\n    fast = slow(e)\nfast", {"slow", "fast"}),
        ("if (n := size) > 3:\n    m = n", {"size"}),
        ("@wrap\ndef f(): pass", {"wrap"}),
        ("a, (b, *c) = t\na, b, c", {"t"}),
        ("while go:\n    go = False", {"go"}),
        ("del gone", {"gone"}),
        ("match kind:\n    case 1:\n        r = one", {"kind", "one"}),
        ("x: int\ny = x", {"x"}),
        ("f'{name!r:>{width}}'", {"name", "width"}),
        ("async def f():\n    async for q in stream: yield q", {"stream"}),
    ],
)  # fmt: skip
def test_names_read_before_they_are_defined(source, names):
    found = names_read(source)
    assert {name for name in found if not hasattr(builtins, name)} == names


def test_values_travel_and_unused_or_own_names_do_not():
    parcel = pack(
        "model = make(width)\nIn; _1; __name__; get_ipython; print(x)",
        {"width": 3, "unused": 4, "make": len, "In": [1], "_1": 2, "__name__": "n", "get_ipython": 5,
         "print": print, "model": object()},
    )  # fmt: skip
    assert pickle.loads(parcel.pickled) == {"width": 3, "make": len}
    assert parcel.sent == ["make", "width"]


def test_a_builtin_name_with_a_value_of_the_notebook_travels():
    assert pack("y = input * 2", {"input": 21}).sent == ["input"]
    assert pack("y = input()", {"input": input}).sent == []


def test_private_names_of_the_user_travel():
    assert pack("y = _scale + __x", {"_scale": 1, "__x": 2}).sent == ["__x", "_scale"]


def test_nothing_needed_is_nothing_sent():
    assert pack("model = 1", {"model": 2}).pickled is None


def test_modules_travel_by_name():
    parcel = pack("a = np.zeros(1) + numpy.ones(1)", {"np": np, "numpy": np})
    assert len(parcel.pickled) < 200
    assert pickle.loads(parcel.pickled) == {"np": np, "numpy": np}


def test_submodules_reached_through_their_package_are_imported_on_the_rank():
    data = pack("tree = xml.etree.ElementTree.parse(p)", {"xml": xml}).pickled
    script = (
        "import pickle, sys; names = pickle.loads(sys.stdin.buffer.read()); "
        "print(names['xml'].etree.ElementTree.__name__)"
    )
    shown = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=True)
    assert shown.stdout.decode().strip() == "xml.etree.ElementTree"


def test_a_module_made_by_hand_travels_by_value():
    module = types.ModuleType("made_by_hand")
    module.answer = 42
    assert pack("made.answer", {"made": module}).sent == ["made"]


def test_classes_and_functions_of_the_notebook_carry_what_they_use(tmp_path):
    main = types.ModuleType("__main__")
    exec(
        "base = 10\ndef helper(x):\n    return x + base\nclass Net:\n    def go(self): return helper(1)",
        vars(main),
    )
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        data = pack("model = Net()", vars(main)).pickled
    finally:
        sys.modules["__main__"] = before
    vars(main).clear()
    assert pickle.loads(data)["Net"]().go() == 11


def test_too_large_an_object_is_named_with_the_way_out():
    with pytest.raises(UsageError, match=r"`big` from the notebook \(more than 1 MB\).*Build `big` inside"):
        pack("small, big", {"small": 1, "big": np.zeros(10**6)}, max_bytes=2**20)


def test_many_small_objects_can_be_too_large_together():
    values = {f"a{i}": np.zeros(40_000 + i) for i in range(8)}
    with pytest.raises(UsageError, match=r"`a7` from the notebook"):
        pack("a0, a1, a2, a3, a4, a5, a6, a7", values, max_bytes=2**20)


def test_an_object_that_cannot_be_sent_is_named():
    with pytest.raises(
        UsageError, match=r"`guard` from the notebook \(a lock\), which cannot be sent.*inside"
    ):
        pack("fine, guard", {"fine": 1, "guard": threading.Lock()})


def test_a_syntax_error_shows_line_and_caret():
    with pytest.raises(CellError, match="line 3 of the cell") as caught:
        check_syntax("a = 1\nif a:\n    b = = 2\n")
    error = caught.value
    assert error.details["lineno"] == 3
    assert error.details["etype"] == "SyntaxError"
    lines = error._render_traceback_()
    assert lines[:3] == ["  Cell, line 3", "    b = = 2", "        ^"]


def test_ipython_syntax_gets_a_hint():
    with pytest.raises(CellError, match="plain Python"):
        check_syntax("%matplotlib inline\nx = 1\n")
