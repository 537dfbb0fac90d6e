"""How much host memory is free on this machine."""

from pathlib import Path


def free_host_memory(unknown: int) -> int:
    """Bytes that this process and others of its machine could still take; `unknown` where the machine does
    not say."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        limits.append(int(limit.read_text()) - int(used.read_text()))
    return min(limits, default=unknown)
