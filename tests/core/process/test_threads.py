"""How many cores there are to compute on."""

from __future__ import annotations

import logging
import math
import os

import pytest
import torch

from triptych.core.options.config import DeviceOptions
from triptych.core.process import threads
from triptych.core.process.threads import UsableCores, num_usable_cores, usable_cores
from triptych.core.runtime.devices.device import open_device


@pytest.fixture
def machine(tmp_path):
    """A /proc/self and control groups of ours: `machine(groups, mount, files)`."""

    def make(groups, mount, files):
        for name, content in files.items():
            file = tmp_path / "groups" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        (tmp_path / "cgroup").write_text(groups)
        point = tmp_path / "groups"
        other = "22 1 0:21 / /proc rw,nosuid shared:5 - proc proc rw\n"
        (tmp_path / "mountinfo").write_text(other + mount.format(point=point))
        return tmp_path

    return make


V2_MOUNT = "30 23 0:26 {root} {{point}} rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "33 31 0:30 {root} {{point}} rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"


def v1(quota_us, folder=""):
    return {f"{folder}cpu.cfs_quota_us": f"{quota_us}\n", f"{folder}cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "mount", "files", "quota"),
    [
        ("0::/\n", V2_MOUNT.format(root="/"), {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", V2_MOUNT.format(root="/"), {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", V2_MOUNT.format(root="/"), {}, math.inf),
        (  # nested: the tightest holds, wherever it is
            "0::/a/b\n",
            V2_MOUNT.format(root="/"),
            {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000", "c/cpu.max": "1 1"},
            2.0,
        ),
        ("0::/a/b\n", V2_MOUNT.format(root="/"), {"a/b/cpu.max": "50000 100000"}, 0.5),
        ("3:cpu,cpuacct:/\n0::/\n", V1_MOUNT.format(root="/"), v1(250000), 2.5),
        ("3:cpu,cpuacct:/a\n", V1_MOUNT.format(root="/"), v1(-1) | v1(300000, "a/"), 3.0),
        ("3:cpuset:/a\n0::/\n", V1_MOUNT.format(root="/"), v1(100000), math.inf),
        # a container that sees the host's path, and only its own folder
        ("3:cpu,cpuacct:/box/1\n", V1_MOUNT.format(root="/box/1"), v1(100000), 1.0),
        ("3:cpu,cpuacct:/box/1\n", V1_MOUNT.format(root="/elsewhere"), v1(100000), 1.0),
    ],
)
def test_the_tightest_quota_around_the_process_is_found(machine, groups, mount, files, quota):
    assert usable_cores(machine(groups, mount, files)).quota == quota


@pytest.mark.parametrize(
    ("quota", "count"),
    [(0.1, 1), (1.0, 1), (1.2, 1), (1.5, 2), (2.0, 2), (3.9, 4), (8.0, 4), (math.inf, 4)],
)
def test_a_quota_bounds_the_count(quota, count):
    assert UsableCores(4, quota).count == count


def test_the_reason_is_reported():
    assert str(UsableCores(4, 1.5)) == "cores to run on: 4, a CPU quota of 1.5"
    assert str(UsableCores(4, math.inf)) == "cores to run on: 4"


def test_outside_linux_there_is_no_quota(tmp_path):
    assert usable_cores(tmp_path / "absent").quota == math.inf


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_affinity_counts_cores_and_not_their_hardware_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 6})
    monkeypatch.setattr(threads, "_SIBLINGS", str(tmp_path / "{}"))
    for cpu, siblings in {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}.items():
        (tmp_path / str(cpu)).write_text(siblings)
    assert usable_cores().num_cores == 3  # 0 and 4, 1 and 5, 6


def test_there_is_at_least_one():
    assert num_usable_cores() >= 1


@pytest.mark.parametrize(("asked", "logged"), [(0, "("), (3, "3 (--threads; ")])
def test_log_has_number_of_threads_and_reason(asked, logged, caplog):
    before = torch.get_num_threads()
    with caplog.at_level(logging.DEBUG):
        open_device(DeviceOptions(device="cpu", threads=asked))
    torch.set_num_threads(before)
    (line,) = (line for line in caplog.messages if line.startswith("threads to compute with: "))
    assert logged in line
    assert str(usable_cores()) in line
