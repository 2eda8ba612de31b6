"""Layers in host memory: the same results, from two buffers that are neither early nor late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.decoder_families import FAMILIES, save_family
from support.decoder_rig import decoder_rig
from support.fake_cuda import CUDA, FakeCuda
from triptych.core.errors import ConfigError
from triptych.core.runtime.decoders.host_plan import HostPlan
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.decoders.projection_targets import AS_STORED, ProjectionTarget
from triptych.core.runtime.layers import host_layers
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.host_layers import HostLayers, _Buffer
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.shards import Shard
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.encoding import WeightEncoding

CPU = torch.device("cpu")


def build(folder: Path, encoding: str, num_bytes: int = 0) -> Decoder:
    with Checkpoint.open(folder) as checkpoint:
        blueprint = NativeBlueprint(
            checkpoint.config,
            max_length=0,
            dtype=torch.float32,
            device=CPU,
            encoding=WeightEncoding.of(encoding, checkpoint.tensors),
        )
        before = blueprint.weight_bytes()
        if num_bytes:
            plan = blueprint.leave_on_host(num_bytes)
            assert blueprint.weight_bytes() == before - plan.saved_bytes < before
        return blueprint.build(checkpoint, lambda share: None)


def logits_of(decoder: Decoder) -> torch.Tensor:
    rig = decoder_rig(decoder)
    row = rig.open(range(3, 12))
    rig.prefill(row)
    rig.decode(row, num_steps=3)
    return torch.stack(list(row.logits.values()))


@pytest.mark.parametrize(
    ("name", "encoding", "num_layers"),
    [("llama-biased-tied", "auto", 3), ("qwen2", "q8_0", 4), ("qwen3-moe", "auto", 4)],
)
@torch.inference_mode()
def test_results_are_those_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, encoding: str, num_layers: int
) -> None:
    monkeypatch.setattr(host_layers, "_PIECE_BYTES", 8192)
    family, extra = FAMILIES[name]
    save_family(tmp_path, family, **extra)
    plain = build(tmp_path, encoding)
    sizes = [sum(each.num_bytes for each in layer.linears()) for layer in plain.layers]
    decoder = build(tmp_path, encoding, sum(sizes[-num_layers:]))
    assert decoder.host_layers is not None
    assert decoder.host_layers.first == len(sizes) - num_layers
    assert {len(each) for each in decoder.host_layers._layers[0].pieces[:-1]} == {8192}
    torch.testing.assert_close(logits_of(decoder), logits_of(plain), rtol=1e-5, atol=1e-5)


def test_layers_that_would_save_nothing_are_refused(tmp_path: Path) -> None:
    save_family(tmp_path, "Llama")
    with pytest.raises(ConfigError, match=r"fewer than three save nothing; give 0\.0"):
        build(tmp_path, "auto", 1)


@pytest.mark.parametrize(
    ("sizes", "num_bytes", "first"),
    [
        ((2, 2, 2, 2), 6, 1),
        ((2, 9, 2, 2, 2), 99, 2),  # with the layer before, buffers take more than is saved
        ((1, 16, 1), 99, None),
        ((2, 2, 2, 2), 5, None),
    ],
)
def test_the_layers_that_save_most_are_chosen(
    sizes: tuple[int, ...], num_bytes: int, first: int | None
) -> None:
    meta: Any = {"has_bias": False, "dtype": torch.float32, "device": torch.device("meta")}
    targets = [
        ProjectionTarget(
            f"layers.{n}.x.weight", Linear(1, size, **meta), 0, Shard.whole(size), AS_STORED
        )
        for n, size in enumerate(sizes)
    ]
    if first is None:
        with pytest.raises(ConfigError, match="save nothing"):
            HostPlan.of(targets, num_bytes, 1)
        return
    plan = HostPlan.of(targets, num_bytes, 1)
    assert plan == HostPlan(first, sizes[first:])
    assert plan.saved_bytes == 2


class _Layer:
    """A layer of one weight."""

    def __init__(self) -> None:
        self.weight = torch.empty(8, device=CUDA)

    def prepare(self) -> None: ...

    def move_weights(self, move: Any) -> None:
        self.weight = move(self.weight)


@pytest.mark.parametrize("num_layers", [3, 4, 5])
def test_no_buffer_is_filled_before_its_use_ended_or_used_before_it_is_filled(
    monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    """By the events alone: nothing else orders the two streams."""
    with FakeCuda():
        streams = _Streams(monkeypatch)
        host = HostLayers(2, CUDA)
        for _ in range(num_layers):
            host.take(_Layer())  # type: ignore[arg-type]
        host.finish()
        for _ in range(3):
            for index in range(2 + num_layers):
                with host.using(index):
                    streams.use(index - 2)
    assert streams.num_uses == 3 * num_layers


class _Streams:
    """A stream that computes and one that copies, and what each knows of the other's progress."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current, self.num_uses = "compute", 0
        self.known = {name: {"compute": 0, "copy": 0} for name in ("compute", "copy")}
        self._used, self._filled = [0, 0], [(-1, 0), (-1, 0)]
        self._number = -1
        fill = _Buffer.fill

        def noted(buffer: _Buffer, number: int, *given: Any) -> None:
            self._number = number
            fill(buffer, number, *given)

        patch.setattr(_Buffer, "fill", noted)
        patch.setattr(torch.cuda, "Event", lambda: _Event(self))
        patch.setattr(torch.cuda, "Stream", lambda device: _Stream(self, "copy"))
        patch.setattr(torch.cuda, "current_stream", lambda device: _Stream(self, "compute"))
        patch.setattr(torch.cuda, "stream", self._copying)

    def _work(self) -> int:
        """A further piece of work of the current stream: its place there."""
        self.known[self.current][self.current] += 1
        return self.known[self.current][self.current]

    @contextmanager
    def _copying(self, stream: _Stream) -> Iterator[None]:
        self.current, place = stream.name, self._number % 2
        assert self.known["copy"]["compute"] >= self._used[place], "it is still read"
        self._filled[place] = (self._number, self._work())
        yield
        self.current = "compute"

    def use(self, number: int) -> None:
        if number < 0:
            return
        found, filled = self._filled[number % 2]
        assert found == number, "another layer is there"
        assert self.known["compute"]["copy"] >= filled, "it is not there yet"
        self._used[number % 2] = self._work()
        self.num_uses += 1


class _Stream:
    def __init__(self, streams: _Streams, name: str) -> None:
        self._streams, self.name = streams, name

    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None:
        own = self._streams.known[self.name]
        own |= {name: max(own[name], place) for name, place in event.places.items()}


class _Event:
    def __init__(self, streams: _Streams) -> None:
        self._streams, self.places = streams, dict[str, int]()

    def record(self) -> None:
        self.places = dict(self._streams.known[self._streams.current])
