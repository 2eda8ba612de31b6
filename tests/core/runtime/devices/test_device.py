"""Which device is opened, and which type it computes in."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from triptych.core.errors import DeviceError
from triptych.core.options.config import DeviceOptions
from triptych.core.runtime.devices import device as device_module
from triptych.core.runtime.devices.device import Device, rank_device


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("no_gpu")
def test_auto_falls_back_to_the_cpu() -> None:
    assert Device.open("auto").is_cpu
    assert Device.open("default").is_cpu
    assert Device.open("cpu").torch == torch.device("cpu")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("spec", ["gpu", "gpu:0", "cuda"])
def test_a_missing_gpu_is_one_actionable_line(spec: str) -> None:
    with pytest.raises(DeviceError, match="--device cpu") as caught:
        Device.open(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_by_number() -> None:
    assert Device.open("auto").torch == torch.device("cuda", 0)
    assert Device.open("gpu:1").torch == torch.device("cuda", 1)
    with pytest.raises(DeviceError, match="No GPU 2: 2 GPU"):
        Device.open("gpu:2")


@pytest.mark.usefixtures("two_gpus")
def test_workspaces_follow_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device.open("gpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert gpu.workspace_bytes() == 32 * 2**20
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert gpu.workspace_bytes() < 9 * 2**20
    assert Device.open("cpu").workspace_bytes() == 0


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_computes_float32_convolutions_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    Device.open("gpu")
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("spec", ["tpu", "gpu:", "gpu:-1", "gpu:0,", "cpu:0", "cpu,gpu", ""])
def test_unknown_devices_are_refused(spec: str) -> None:
    with pytest.raises(DeviceError, match=r"use auto, cpu, gpu or gpu:N"):
        Device.open(spec)


@pytest.mark.usefixtures("two_gpus")
def test_several_gpus_are_refused_with_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"--device gpu:0,1: .*gpu:0, or .*--replicas 2"):
        Device.open("gpu:0,1")


@pytest.mark.parametrize("spec", ["mps", "metal"])
def test_gpus_of_apple_are_refused_by_name(spec: str) -> None:
    with pytest.raises(DeviceError, match=rf"^--device {spec}: .*--device cpu"):
        Device.open(spec)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("gpu", ("gpu", "gpu:1")),
        ("auto", ("auto", "gpu:1")),
        ("gpu:2", ("gpu:2", "gpu:3")),
        ("gpu:3,1", ("gpu:3", "gpu:1")),
        ("gpu:0,1,2", ("gpu:0,1,2", "gpu:0,1,2")),  # `Device.open` refuses them
        ("cpu", ("cpu", "cpu")),
    ],
)
def test_the_devices_of_ranks(
    monkeypatch: pytest.MonkeyPatch, spec: str, names: tuple[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = DeviceOptions(device=spec, tensor_parallel_size=2)
    assert tuple(rank_device(options, rank) for rank in range(2)) == names


@pytest.mark.usefixtures("two_gpus")
def test_a_device_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Fake {device.index}")
    assert Device.open("default").name == "gpu:0 (Fake 0)"
    assert Device.open("gpu:1").name == "gpu:1 (Fake 1)"
    assert Device.open("cpu").name == "cpu"


@pytest.mark.parametrize("is_fast", [True, False])
def test_cpu_types_follow_the_checkpoint_where_they_are_fast(
    monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    monkeypatch.setattr(device_module, "has_fast_cpu_bfloat16", lambda: is_fast)
    cpu = Device.open("cpu")
    half = torch.bfloat16 if is_fast else torch.float32
    assert cpu.compute_dtype(torch.bfloat16) is half
    assert cpu.compute_dtype(torch.float16) is half
    assert cpu.compute_dtype(torch.float32) is torch.float32


def test_free_memory_respects_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit, usage = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(device_module, "_CGROUP_LIMIT", limit)
    monkeypatch.setattr(device_module, "_CGROUP_USAGE", usage)
    cpu = Device.open("cpu")
    assert 0 < cpu.free_bytes() <= psutil.virtual_memory().total
    limit.write_text("5000000\n")
    usage.write_text("2000000\n")
    assert cpu.free_bytes() == 3_000_000
    limit.write_text("max\n")
    assert cpu.free_bytes() > 3_000_000


def test_what_the_allocator_holds_unused_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert Device(torch.device("cuda", 0)).obtainable_bytes() == 700
    assert Device.open("cpu").obtainable_bytes() > 0


GROWTH = """
import ctypes, torch
from triptych.core.runtime.devices.device import Device

class Books(ctypes.Structure):  # mallinfo2 of malloc.h
    _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Books
Device.open("cpu")
torch.set_num_threads(1)
weight_NK = torch.randn(1536, 576).bfloat16()
with torch.inference_mode():
    torch.nn.functional.linear(torch.randn(1, 576).bfloat16(), weight_NK)
    before = libc.mallinfo2().field_7  # bytes in use
    for num_rows in range(2, 702):
        torch.nn.functional.linear(torch.randn(num_rows, 576).bfloat16(), weight_NK)
print(libc.mallinfo2().field_7 - before)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2") or not device_module.has_fast_cpu_bfloat16(),
    reason="needs a new glibc, and products that oneDNN compiles",
)
def test_prompts_of_any_length_do_not_fill_memory_with_compiled_products() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, check=True)
    assert int(done.stdout) < 250 * 2**20  # without a bound 400 MiB, and more with more lengths


def test_a_bound_on_compiled_products_in_the_environment_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    Device.open("cpu")
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert int(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 1024
