"""The free memory of the host, and of a container."""

from pathlib import Path

from megatron.mpu.memory import free_host_memory


def test_memory_is_what_is_free(tmp_path: Path) -> None:
    for name in ("proc", "sys/fs/cgroup"):
        (tmp_path / name).mkdir(parents=True)
    assert free_host_memory(7, tmp_path) == 7
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemFree: 1000 kB\nMemAvailable: 5000 kB\n")
    assert free_host_memory(7, tmp_path) == 5000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("1024\n")
    assert free_host_memory(7, tmp_path) == 5000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("4096\n")
    assert free_host_memory(7, tmp_path) == 3072
