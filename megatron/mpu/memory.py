"""Measures the free host memory of this machine."""

from pathlib import Path


def free_host_memory(unknown: int) -> int:
    """Returns the bytes of host memory that processes can still allocate; `unknown` if the system does not
    report them."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, usage = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and usage.exists() and limit.read_text().strip().isdigit():
        limits.append(int(limit.read_text()) - int(usage.read_text()))
    return min(limits, default=unknown)
