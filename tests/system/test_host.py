"""The host: memory, cores and limits, read from files of /proc and of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmoe.system.host import Processor, environment, memory, processor

MEMINFO = """\
MemTotal:       64000000 kB
MemFree:         1000000 kB
MemAvailable:   32000000 kB
SwapTotal:       8000000 kB
SwapFree:        2000000 kB
"""
CPUINFO = "\n\n".join(
    f"processor\t: {i}\nmodel name\t: A Processor\nphysical id\t: 0\ncore id\t\t: {i // 2}" for i in range(8)
)
KIB = 1024


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_without_limits(tmp_path: Path) -> None:
    found = memory(write(tmp_path, {"proc/meminfo": MEMINFO}))
    assert found is not None
    assert (found.total, found.available, found.limit) == (64_000_000 * KIB, 32_000_000 * KIB, None)
    assert (found.swap_total, found.swap_free) == (8_000_000 * KIB, 2_000_000 * KIB)


def test_memory_is_not_known_without_proc(tmp_path: Path) -> None:
    assert memory(tmp_path) is None
    assert processor(tmp_path).model is None


def test_smallest_limit_of_nested_control_groups_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": "8000000000\n",
        "sys/fs/cgroup/outer/memory.current": "6000000000\n",
        "sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 1000000000\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
    }
    found = memory(write(tmp_path, files))
    assert found is not None
    assert (found.limit, found.available) == (8_000_000_000, 3_000_000_000), "page cache can be freed"
    assert processor(tmp_path).quota == 1.5


def test_control_groups_of_version_1_in_a_container(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000000",  # mounted at the top: /docker/abc is the host's
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    found = memory(write(tmp_path, files))
    assert found is not None
    assert (found.limit, found.available) == (4_000_000_000, 3_000_000_000)
    assert processor(tmp_path).quota == 2.0


@pytest.mark.parametrize(
    "files",
    [
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": "nonsense"},
        {"sys/fs/cgroup/memory.max": "max"},
        {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
        {"sys/fs/cgroup/cpu.max": "garbage"},
    ],
)
def test_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    common = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:memory:/\n3:cpu:/\n0::/\n\nx\n"}
    found = memory(write(tmp_path, common | files))
    assert found is not None
    assert found.limit is None
    assert processor(tmp_path).quota is None


def test_processor_counts_cores(tmp_path: Path) -> None:
    found = processor(write(tmp_path, {"proc/cpuinfo": CPUINFO}))
    assert (found.model, found.physical_cores) == ("A Processor", 4)


@pytest.mark.parametrize(("allowed", "quota", "usable"), [(8, None, 8), (8, 2.5, 2), (4, 6.0, 4), (8, 0.5, 1)])
def test_usable_cores(allowed: int, quota: float | None, usable: int) -> None:
    assert Processor(None, None, 16, allowed, quota).usable_cores == usable


def test_environment_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("SPMOE_API_KEY", "also secret")
    monkeypatch.setenv("SPMOE_HOME", "/here")
    monkeypatch.setenv("OTHER", "1")
    found = environment(["HF_TOKEN"], ("SPMOE_",))
    assert found["HF_TOKEN"] == found["SPMOE_API_KEY"] == "(set)"
    assert found["SPMOE_HOME"] == "/here"
    assert "OTHER" not in found
