"""The whole way in one process, on a small network: engine, service, pipeline, command."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.asr import noise, transcribe_request, wav, write_folder
from support.recognizers import write_recognizer
from triptych.core.engine_api.job import Job
from triptych.core.errors import (
    ConfigError,
    InvalidRequest,
    MemoryBudgetExceeded,
    UnsupportedOption,
)
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.asr.api.cli import add_transcribe_arguments, run_transcribe
from triptych.modalities.asr.api.pipeline import TranscriptionPipeline, resample
from triptych.modalities.asr.engine.loader import AsrLoader, open_pace
from triptych.modalities.asr.spec import MAX_PART_S, SAMPLE_RATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ears")
    write_folder(folder)
    return folder


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Iterator[TranscriptionPipeline]:
    with TranscriptionPipeline.from_pretrained(str(folder), progress=False, threads=1) as pipeline:
        yield pipeline


def test_samples_bytes_and_files_say_the_same(
    pipeline: TranscriptionPipeline, tmp_path: Path
) -> None:
    data = wav(noise(4.0))
    file = tmp_path / "a.wav"
    file.write_bytes(data)
    whole = pipeline(file, temperature=0.4, seed=1)
    assert whole.duration_s == 4.0
    assert whole.text
    assert pipeline(data, temperature=0.4, seed=1) == whole
    assert pipeline(str(file), temperature=0.4, seed=1) == whole
    samples = (noise(4.0) * 32768).round() / 32768
    assert pipeline(samples.astype(np.float32), temperature=0.4, seed=1).duration_s == 4.0


def test_a_stream_is_the_whole(pipeline: TranscriptionPipeline) -> None:
    whole = pipeline(noise(7.0), temperature=0.4, seed=1)
    assert tuple(pipeline.stream(noise(7.0), temperature=0.4, seed=1)) == whole.segments
    progress_s = [delta.heard_s for delta in pipeline.deltas(noise(7.0), temperature=0.4, seed=1)]
    assert progress_s[-1] == 7.0


def test_leaving_a_stream_frees_the_engine(pipeline: TranscriptionPipeline) -> None:
    for _ in pipeline.deltas(noise(60.0), temperature=0.4):
        break
    assert pipeline(noise(2.0), temperature=0.4).duration_s == 2.0


async def test_async_twins(pipeline: TranscriptionPipeline) -> None:
    one, other = await asyncio.gather(
        pipeline.acall(noise(3.5), temperature=0.4, seed=1),
        pipeline.acall(noise(3.5), temperature=0.4, seed=1),
    )
    assert one == other
    segments = [s async for s in pipeline.astream(noise(3.5), temperature=0.4, seed=1)]
    assert tuple(segments) == one.segments


@pytest.mark.parametrize(
    "audio", [np.zeros((2, 16_000), np.float32), np.full(16_000, np.nan), np.ones(16_000, np.int16)]
)
def test_what_is_no_sound_is_refused(pipeline: TranscriptionPipeline, audio: np.ndarray) -> None:
    with pytest.raises(InvalidRequest, match="one-dimensional"):
        pipeline(audio)


def test_other_rates_are_resampled(pipeline: TranscriptionPipeline) -> None:
    assert len(resample(noise(1.0), 8000)) == 2 * SAMPLE_RATE
    assert pipeline((noise(1.0), 8000)).duration_s == pytest.approx(2.0)


@pytest.mark.parametrize("rate", [0, -16_000, 10**9, 16_000.5, "16000"])
def test_impossible_rates_are_refused(pipeline: TranscriptionPipeline, rate: Any) -> None:
    with pytest.raises(InvalidRequest, match="whole number"):
        pipeline((noise(1.0), rate))


def test_memory_is_booked_and_given_back(folder: Path) -> None:
    ledger = Ledger(2**30)
    loader = AsrLoader(resolved(folder), Config(), Device.open("cpu"), ledger)
    loaded = loader.load(lambda share: None)
    held = ledger.by_owner()
    assert set(held) == {"ears/weights", "ears/recordings"}
    loaded.scheduler.check()
    loaded.close()
    ledger.check()
    assert ledger.available_bytes == 2**30
    small = Ledger(held["ears/weights"] + 1)
    loader = AsrLoader(resolved(folder), Config(), Device.open("cpu"), small)
    with pytest.raises(MemoryBudgetExceeded, match="ears/recordings"):
        loader.load(lambda share: None)


def resolved(folder: Path) -> ResolvedModel:
    return ResolvedModel(name="ears", reference="ears", folder=str(folder), digest="ab" * 32)


@pytest.mark.parametrize("num_samples", [0, MAX_PART_S * SAMPLE_RATE + 1])
def test_the_engine_bounds_a_part(num_samples: int) -> None:
    request = transcribe_request(np.zeros(num_samples, np.float32))
    job = Job(job_id="j", model="ears", request=request, sink=lambda _: None, arrival_s=0.0)
    with pytest.raises(InvalidRequest):
        open_pace(job)


def run(folder: Path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_transcribe_arguments(parser)
    common = ("--model", str(folder), "--threads", "1", "--temperature", "0.4")
    return run_transcribe(parser.parse_args([*arguments, *common, "--request-seed", "1"]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "talk.wav"
    file.write_bytes(wav(noise(4.0)))
    return file


def test_the_command_writes_to_stdout(
    folder: Path, file: Path, pipeline: TranscriptionPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, str(file)) == 0
    assert capsys.readouterr().out == pipeline(file, temperature=0.4, seed=1).text.strip() + "\n"


def test_the_command_reads_stdin(
    folder: Path,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert run(folder, "--format", "verbose_json", "--words") == 0
    reply = json.loads(capsys.readouterr().out)
    assert reply["duration"] == 4.0
    assert reply["words"]


def test_the_command_writes_a_file_each_and_goes_on_after_a_bad_one(
    folder: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = tmp_path / "absent.wav"
    output = tmp_path / "out"
    assert run(folder, str(absent), str(file), "-o", str(output), "--format", "srt") == 1
    assert [path.name for path in output.iterdir()] == ["talk.srt"]
    assert (output / "talk.srt").read_text().startswith("1\n00:00:")
    assert "absent.wav" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--words", "x.wav"), "verbose_json"),
        (("x.wav", "--temperature", "3"), "temperature"),
        (("a/x.wav", "b/x.mp3", "-o", "out"), "the same file"),
    ],
)
def test_the_command_checks_its_options(
    folder: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    parser = argparse.ArgumentParser()
    add_transcribe_arguments(parser)
    with pytest.raises(ConfigError, match=complaint):
        run_transcribe(parser.parse_args([*arguments, "--model", str(folder)]))


def test_many_files_go_on_where_a_run_stopped(folder: Path, tmp_path: Path) -> None:
    sounds, out, listed = tmp_path / "in", tmp_path / "out", tmp_path / "more.jsonl"
    (sounds / "deep").mkdir(parents=True)
    (sounds / "a.wav").write_bytes(wav(noise(2.0)))
    (sounds / "deep" / "b.wav").write_bytes(b"no sound")
    (sounds / "notes.md").write_text("no sound either")
    other = tmp_path / "c.wav"
    other.write_bytes(wav(noise(2.0)))
    rows = [{"file": str(other), "id": 7, "language": "en"}, {"file": 5}]
    listed.write_text("\n".join(map(json.dumps, rows)))
    given = (str(sounds), "-i", str(listed), "-o", str(out), "--format", "srt")

    assert run(folder, *given) == 1
    first, wrong, labelled, untyped = results(out)
    assert (first["files"], first["duration_s"]) == (["a.srt"], 2.0)
    assert wrong["error"]["code"] == "unsupported_media_type"
    assert (labelled["files"], labelled["id"]) == (["c.srt"], 7)
    assert untyped["error"]["code"] == "invalid_request"
    written_ns = (out / "a.srt").stat().st_mtime_ns

    (sounds / "deep" / "b.wav").write_bytes(wav(noise(1.0)))
    (out / "c.srt").unlink()
    assert run(folder, *given) == 1
    assert [each.get("files") for each in results(out)] == [
        ["a.srt"],
        ["deep/b.srt"],
        ["c.srt"],
        None,
    ]
    assert (out / "a.srt").stat().st_mtime_ns == written_ns


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_family_of_transformers_the_whole_way(tmp_path: Path) -> None:
    write_recognizer("parakeet_tdt", tmp_path)
    with TranscriptionPipeline.from_pretrained(str(tmp_path), progress=False, threads=1) as hear:
        whole = hear(noise(4.0), has_word_times=True)
        assert whole.text
        assert "".join(segment.text for segment in whole.segments).strip() == whole.text
        assert " ".join(word.text.strip() for word in whole.words) == whole.text
        assert 0 <= whole.words[0].start_s < whole.words[-1].end_s <= 4.0
        with pytest.raises(UnsupportedOption, match="takes no prompt"):
            hear(noise(1.0), prompt="Anna")
