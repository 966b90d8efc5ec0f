"""What all tests share: the tests below tests/cluster start real engines and carry the marker `cluster`."""

from __future__ import annotations

from pathlib import Path

import pytest

CLUSTER_TESTS = Path(__file__).resolve().parent / "cluster"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [item for item in items if CLUSTER_TESTS in item.path.parents]
    for item in slow:
        item.add_marker(pytest.mark.cluster)
    # What is quick to fail runs first.
    items[:] = [item for item in items if CLUSTER_TESTS not in item.path.parents] + slow
    # Here and not with `-m` in pyproject.toml, which any `-m` on the command line (`-m cluster`) would replace.
    if "long" not in (config.getoption("markexpr") or ""):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
