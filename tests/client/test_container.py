"""Memory and cores come from the container's cgroup; made-up trees stand in for the machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftnb.client import container
from ftnb.client.container import Container
from ftnb.errors import UsageError

GB = 10**9


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that writes files below a fake root and returns the root; 16 GB host, 12 GB available."""
    monkeypatch.setattr(container, "_allowed_cores", lambda: 8)

    def write(files: dict[str, str]) -> Path:
        base = {"proc/meminfo": f"MemTotal: {16 * GB // 1024} kB\nMemAvailable: {12 * GB // 1024} kB\n"}
        for name, text in (base | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_without_limits_it_is_the_machine(machine):
    found = container.look(machine({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}))
    assert found.cores == 8
    assert found.free_bytes == pytest.approx(12 * GB, abs=2048)


def test_cgroup_v2_the_tightest_level_counts_and_file_cache_is_free(machine):
    found = container.look(
        machine(
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/memory.max": f"{2 * GB}\n",
                "sys/fs/cgroup/pod/memory.current": f"{GB}\n",
                "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GB // 2}\n",
                "sys/fs/cgroup/pod/box/memory.max": "max\n",
                "sys/fs/cgroup/pod/box/cpu.max": "150000 100000\n",
            }
        )
    )
    assert found == Container(cores=1, memory_bytes=2 * GB, free_bytes=2 * GB - GB // 2)


def test_cgroup_v1_inside_a_container_whose_path_does_not_exist_here(machine):
    found = container.look(
        machine(
            {
                "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB // 4}\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            }
        )
    )
    assert found == Container(cores=2, memory_bytes=GB, free_bytes=GB - GB // 4)


def test_cgroup_v1_without_a_limit(machine):
    files = {
        "proc/self/cgroup": "4:memory:/\n2:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    found = container.look(machine(files))
    assert found.cores == 8
    assert found.free_bytes == pytest.approx(12 * GB, abs=2048)


def test_this_very_machine_can_be_read():
    found = container.look()
    assert found.cores >= 1
    assert 0 < found.free_bytes <= found.memory_bytes


@pytest.mark.parametrize(
    "cores, free, ranks",
    [(8, 16 * GB, 4), (2, 16 * GB, 4), (1, 16 * GB, 2), (8, int(1.1 * GB), 2), (8, GB // 10, 1)],
)
def test_default_number_of_ranks(cores, free, ranks):
    assert container.default_num_ranks(Container(cores, free, free)) == ranks


def test_threads_share_the_cores():
    assert container.default_threads(Container(8, GB, GB), 4) == 2
    assert container.default_threads(Container(2, GB, GB), 4) == 1


def test_more_ranks_than_memory_holds_are_refused_with_what_to_type():
    small = Container(8, 2 * GB, 2 * GB)
    container.refuse_more_than_fit(small, 4)
    with pytest.raises(UsageError, match=r"5 ranks need about 1.5 GB.*%ft_cluster start -n 4 \(in Python: Session.start\(4\)\)\."):
        container.refuse_more_than_fit(small, 5)


def test_spares_need_as_much_as_ranks():
    small = Container(8, 2 * GB, 2 * GB)
    container.refuse_more_than_fit(small, 3, 1)
    with pytest.raises(UsageError, match=r"3 ranks and 2 spares need about 1.5 GB.*With 3 ranks, at most 1 spare can be kept: --spares 1\."):
        container.refuse_more_than_fit(small, 3, 2)
    with pytest.raises(UsageError, match=r"5 ranks and 1 spare need.*Start at most 4"):
        container.refuse_more_than_fit(small, 5, 1)
    assert container.default_num_ranks(small, 1) == 3
    assert container.default_num_ranks(small, 9) == 1


def test_growing_counts_what_is_added():
    small = Container(8, 2 * GB, GB // 2)  # one more fits
    container.refuse_to_grow(small, 5, 4)
    with pytest.raises(UsageError, match=r"2 ranks more need about 0.6 GB.*At most 5 are possible: -n 5\."):
        container.refuse_to_grow(small, 6, 4)
    with pytest.raises(UsageError, match=r"One rank more needs about 0.3 GB.*Free some memory"):
        container.refuse_to_grow(Container(8, 2 * GB, GB // 4), 5, 4)
