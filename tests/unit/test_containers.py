"""Limits of containers, in made-up trees of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire import config, containers

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemAvailable: 67108864 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    root = tree(tmp_path, {})
    assert config.available_memory(root) == 64 * GIB
    assert config.usable_cores(root) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("path", ["/", "/user.slice/app", "/../other"])
def test_a_container_of_version_2(tmp_path: Path, path: str) -> None:
    root = tree(tmp_path, {
        "proc/self/cgroup": f"0::{path}\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file 7\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
    })  # fmt: skip
    assert config.available_memory(root) == 3 * GIB // 2
    assert containers.cores(root) == 2


def test_the_smallest_limit_on_the_way_counts(tmp_path: Path) -> None:
    at = "sys/fs/cgroup/"
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/a/b/c\n",
        f"{at}a/memory.max": f"{3 * GIB}", f"{at}a/memory.current": f"{GIB}",
        f"{at}a/b/memory.max": "max", f"{at}a/b/memory.current": "5",
        f"{at}a/b/c/memory.max": f"{8 * GIB}", f"{at}a/b/c/memory.current": "0",
        f"{at}a/cpu.max": "max 100000", f"{at}a/b/cpu.max": "50000 100000",
        f"{at}a/b/c/cpu.max": "400000 100000",
    })  # fmt: skip
    assert config.available_memory(root) == 2 * GIB
    assert containers.cores(root) == 1 == config.usable_cores(root)


def test_a_container_of_version_1(tmp_path: Path) -> None:
    root = tree(tmp_path, {
        "proc/self/cgroup": "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 3\ntotal_inactive_file {GIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    assert config.available_memory(root) == 2 * GIB
    assert containers.cores(root) == 3


@pytest.mark.parametrize("rubbish", ["", "::", "0", "0::", "\x00", "0::/\n1:memory"])
def test_rubbish_is_no_limit(tmp_path: Path, rubbish: str) -> None:
    root = tree(tmp_path, {
        "proc/self/cgroup": rubbish,
        "sys/fs/cgroup/memory.max": "-5", "sys/fs/cgroup/cpu.max": "x y",
    })  # fmt: skip
    assert containers.free_memory(root) is None and containers.cores(root) is None


def test_more_is_used_than_allowed(tmp_path: Path) -> None:
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "100", "sys/fs/cgroup/memory.current": "150",
    })  # fmt: skip
    assert config.available_memory(root) == 0


def test_defaults_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "free_memory", lambda root: 2 * GIB)
    monkeypatch.setattr(containers, "cores", lambda root: 1)
    settings = config.LoadConfig()
    assert settings.budget_bytes() <= 2 * GIB and settings.thread_count() == 1
    assert config.LoadConfig(threads=2).thread_count() == 2
    monkeypatch.setattr(containers, "free_memory", lambda root: GIB // 2)
    assert settings.budget_bytes() == GIB // 4
