"""Measures the free host memory of this machine."""

from pathlib import Path


def free_host_memory(unknown: int, root: Path = Path("/")) -> int:
    """Returns how many bytes of host memory processes can still allocate.

    This is the smaller of MemAvailable in /proc/meminfo and the rest of the cgroup's limit; `unknown` if
    neither is known. root: the folder that holds /proc and /sys.
    """
    meminfo = root / "proc/meminfo"
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, usage = root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current"
    if limit.exists() and usage.exists() and limit.read_text().strip().isdigit():
        limits.append(int(limit.read_text()) - int(usage.read_text()))
    return min(limits, default=unknown)
