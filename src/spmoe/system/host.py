"""The host: processor, memory and limits, as Linux reports them, including those of a container.

Every function returns None for a fact that the system does not report.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_CGROUPS = "sys/fs/cgroup"
_V1_UNLIMITED = 2**60  # cgroup v1 writes a number near 2**63 for no limit


@dataclass(frozen=True, slots=True)
class Processor:
    """Processor and the share of it that this process may use."""

    model: str | None
    physical_cores: int | None
    logical_cores: int
    allowed_cores: int  # by affinity (taskset, cpuset)
    quota: float | None  # cores' worth of time by the control group; None: no limit

    @property
    def usable_cores(self) -> int:
        """Number of threads that can run at the same time."""
        return max(1, min(self.allowed_cores, math.floor(self.quota) if self.quota is not None else self.allowed_cores))


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory in bytes."""

    total: int
    available: int  # that can be allocated without swapping, within the control group's limit
    limit: int | None  # by the control group
    swap_total: int
    swap_free: int


def allowed_cores() -> int:
    """Return the number of logical cores that this process may run on, whatever its share of their time is."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor(root: Path = _ROOT) -> Processor:
    """Return the processor's name and cores."""
    allowed = allowed_cores()
    fields = [re.split(r"\s*:\s*", line, maxsplit=1) for line in (_read(root / "proc/cpuinfo") or "").splitlines()]
    values: dict[str, list[str]] = {}
    for pair in fields:
        if len(pair) == 2:
            values.setdefault(pair[0], []).append(pair[1].strip())
    cores = set(zip(values.get("physical id", []), values.get("core id", []), strict=False))
    model = next(iter(values.get("model name", [])), None)
    return Processor(model, len(cores) or None, os.cpu_count() or allowed, allowed, _cpu_quota(root))


def memory(root: Path = _ROOT) -> Memory | None:
    """Return the host's memory, as far as this process may use it."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo") or "", re.MULTILINE))
    if "MemTotal" not in found:
        return None
    sizes = {name: int(value) * 1024 for name, value in found.items()}
    total, available = sizes["MemTotal"], sizes.get("MemAvailable", sizes.get("MemFree", 0))
    limit = None
    for limit_bytes, used in _memory_limits(root):
        if limit_bytes < total:
            limit = min(limit_bytes, limit or limit_bytes)
            available = min(available, max(0, limit_bytes - used))
    return Memory(total, available, limit, sizes.get("SwapTotal", 0), sizes.get("SwapFree", 0))


def available_memory() -> int:
    """Return the bytes of host memory that can be allocated without swapping, within the container's limit."""
    found = memory()
    return found.available if found is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def locked_memory_limit() -> int | None:
    """Return the bytes that this process may lock (`ulimit -l`); None: unlimited."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


# ---- control groups


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and its ancestors; version 2 first."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            top = root / _CGROUPS
        elif controller in controllers.split(","):
            top = root / _CGROUPS / controllers
            top = top if top.is_dir() else root / _CGROUPS / controller
        else:
            continue
        folder = top / path.lstrip("/")
        if not folder.is_dir():  # inside a container, the path is that of the host and only the top is mounted
            folder = top
        yield folder
        for parent in folder.parents:
            if not parent.is_relative_to(top):
                break
            yield parent


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) of every control group above this process, in bytes; page cache does not count as used."""
    for folder in _cgroup_folders(root, "memory"):
        for limit_file, used_file, inactive in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read_number(folder / limit_file), _read_number(folder / used_file)
            if limit is not None and limit < _V1_UNLIMITED:
                stat = dict(re.findall(r"^(\w+) (\d+)$", _read(folder / "memory.stat") or "", re.MULTILINE))
                yield limit, max(0, (used or 0) - int(stat.get(inactive, 0)))


def _cpu_quota(root: Path) -> float | None:
    """Return the cores' worth of time that control groups allow; None: no limit."""
    quotas: list[float] = []
    for folder in _cgroup_folders(root, "cpu"):
        words = (_read(folder / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _read_number(folder / "cpu.cfs_quota_us"), _read_number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _read_number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


# ---- names of environment variables

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)


def environment(names: Iterable[str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of these names or prefixes that are set; secrets are hidden."""
    wanted = set(names)
    return {
        name: "(set)" if _SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if name in wanted or name.startswith(prefixes)
    }
