"""Ranks in processes of their own: they answer as one, and die with what they belong to."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
import transformers

from support.child_processes import ranks_of
from support.roles import series
from support.serve_process import eventually
from support.text_models import write_text_folder
from triptych.compose import build_engine
from triptych.core.engine_api.job import Output
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import DeviceError, EngineDown, TriptychError
from triptych.core.options.config import (
    Config,
    DeviceOptions,
    ModelOptions,
    ScheduleOptions,
    ServerOptions,
)
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.core.runtime.engine import ranks
from triptych.core.weights.resolve import ResolvedModel
from triptych.schedulers.local import LocalClient

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_START = """
import sys, time
from test_rank_faults import open_client, model_in, ranks_of
client = open_client(model_in(sys.argv[1]), 2)
while not client.status().is_ready:
    time.sleep(0.02)
print(*(rank.pid for rank in ranks_of()), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(5)
    config = transformers.Qwen2Config(
        vocab_size=259, max_position_embeddings=1024, initializer_range=0.2, **_SIZES, **_HEADS
    )
    config.update({"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1})
    config.layer_types = ["full_attention", "sliding_attention"]
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    write_text_folder(folder, **config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]})
    return folder


def model_in(folder: Path | str) -> ResolvedModel:
    return ResolvedModel(name="tiny", reference="tiny", folder=str(folder), digest="00")


def open_client(model: ResolvedModel, num_ranks: int) -> LocalClient:
    device = DeviceOptions(device="cpu", tensor_parallel_size=num_ranks, threads=1)
    config = Config(
        models=ModelOptions(model=(model.reference,)),
        device=device,
        schedule=ScheduleOptions(max_batch_size=4),
        server=ServerOptions(stream_timeout_s=math.inf),  # as a pipeline has it
    )
    return LocalClient(build_engine(config, [model]))


def request(max_tokens: int) -> TokenRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return TokenRequest(prompt_ids=tuple(range(3, 40)), sampling=sampling)


async def ask(client: LocalClient, max_tokens: int = 40) -> list[Output]:
    await client.load("tiny")
    return [output async for output in client.submit("tiny", request(max_tokens), job_id="a")]


def tokens_of(outputs: list[Output]) -> list[int]:
    assert all(output.error is None for output in outputs)
    return [token for output in outputs if output.payload for token in output.payload.token_ids]


async def kill_while_asking(client: LocalClient) -> float:
    """Kill the rank once a long answer has begun; how long it took until that ended."""
    outputs = client.submit("tiny", request(900), job_id="b")
    await anext(outputs)
    ranks_of()[0].kill()
    killed_s = time.monotonic()
    with pytest.raises(EngineDown):
        async for _ in outputs:
            pass
    return time.monotonic() - killed_s


def test_two_ranks_answer_as_one_until_one_dies(folder: Path) -> None:
    async def of_one() -> list[Output]:
        client = open_client(model_in(folder), 1)
        try:
            return await ask(client)
        finally:
            await client.close()

    async def of_two() -> tuple[list[Output], float]:
        client = open_client(model_in(folder), 2)
        outputs = await ask(client)
        assert len(ranks_of()) == 1
        assert await series(client, "kv_window_pages", 1), "its windows have pages of their own"
        took_s = await kill_while_asking(client)
        await client.close()
        return outputs, took_s

    expected = tokens_of(asyncio.run(of_one()))
    outputs, took_s = asyncio.run(of_two())
    assert len(expected) == 40
    assert tokens_of(outputs) == expected
    assert took_s < 10  # by the cut connection, and no timeout of the group's
    assert not ranks_of()


def test_a_rank_that_cannot_start_fails_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "rank_device", lambda options, rank: "gpu:77")
    client = open_client(model_in(folder), 2)

    async def load() -> TriptychError:
        with pytest.raises(DeviceError) as caught:
            await client.load("tiny")
        await client.close()
        return caught.value

    assert "Rank 1: No GPU 77" in asyncio.run(load()).message
    assert not ranks_of()


def test_a_rank_that_dies_before_the_meeting_fails_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank that has opened its device nobody else would notice: the meeting has no peers."""
    (tmp_path / "short_lived.py").write_text(
        'import os; os.write(0, b\'{"type": "Phase", "name": "opened"}\\n\')'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ranks, "_PROGRAM", "short_lived")
    config = Config(device=DeviceOptions(device="cpu", tensor_parallel_size=2))
    with pytest.raises(DeviceError, match="Rank 1 ended"):
        ranks.Ranks.start(config, model_in(tmp_path), Device(torch.device("cpu")), 2)


def test_a_rank_that_dies_is_noticed_before_those_that_still_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank_two_dies.py").write_text(
        "import json, socket, time\n"
        "setup = json.loads(socket.socket(fileno=0).makefile('rb').readline())\n"
        "time.sleep(600 if setup['rank'] == 1 else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ranks, "_PROGRAM", "rank_two_dies")
    monkeypatch.setattr(ranks, "_START_TIMEOUT_S", 60.0)
    monkeypatch.setattr(ranks, "_END_TIMEOUT_S", 0.01)
    config = Config(device=DeviceOptions(device="cpu", tensor_parallel_size=3))
    with pytest.raises(DeviceError, match="Rank 2 ended"):
        ranks.Ranks.start(config, model_in(tmp_path), Device(torch.device("cpu")), 3)
    assert not ranks_of()


def test_what_lies_in_the_current_folder_is_no_part_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triptych.py").write_text("open('taken', 'w')")
    monkeypatch.chdir(tmp_path)
    ranks_end_at_once(monkeypatch)
    assert not (tmp_path / "taken").exists()


def test_a_process_that_cannot_be_started_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    ranks_end_at_once(monkeypatch)


def ranks_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process = start_in_vain(monkeypatch)
    with pytest.raises(DeviceError, match="ended"):
        process.expect(ranks.Phase, 60)
    process.close()


def start_in_vain(monkeypatch: pytest.MonkeyPatch) -> ranks.RankProcess:
    """A rank whose setup cannot be read."""
    process = ranks.RankProcess(1)
    monkeypatch.setattr("msgspec.json.encode", lambda setup: b"{}")
    process.start(setup=None)  # type: ignore[arg-type]
    return process


def test_a_rank_that_ends_is_not_waited_for_where_parts_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that share tokens and those that share branches meet again, after all have met."""
    is_over = threading.Event()
    group: RankGroup = None  # type: ignore[assignment]  # nobody asks it
    with ExitStack() as stack:
        stack.callback(is_over.set)
        process = start_in_vain(monkeypatch)
        stack.callback(process.close)
        with pytest.raises(DeviceError, match="Rank 1 ended"):
            ranks.Ranks(group, [process], stack).divide(lambda group: is_over.wait(60))


def test_no_rank_outlives_a_parent_that_is_killed(folder: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _START, str(folder)],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        (pid,) = map(int, parent.stdout.readline().split())
        rank = psutil.Process(pid)
        parent.kill()
    eventually(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
