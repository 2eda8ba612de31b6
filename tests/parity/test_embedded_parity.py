"""The embedded model, for real, against transformers: tokens in float32, logits in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from support.decoder_rig import RoundedReference, decoder_rig, load_decoder
from support.kernel_levels import LEVELS
from support.tiers import first
from support.weight_files import plain_copy
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, resolve

NUM_NEW_TOKENS = 24
SUBJECTS = (
    "the sea",
    "a red bicycle",
    "prime numbers",
    "the Roman empire",
    "photosynthesis",
    "my neighbour's cat",
    "Python decorators",
    "rain in Lisbon",
    "black holes",
    "bread",
)
OPENINGS = (
    "Tell me about {}.",
    "Write a haiku on {}:",
    "Q: What is {}?\nA:",
    "Once upon a time, {}",
    "def explain():\n    '''{}'''\n",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    resolved = resolve(
        EMBEDDED_REFERENCE, name=None, options=ModelOptions(), progress=SilentProgress()
    )
    return Path(resolved.folder)


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model: Any = transformers.LlamaForCausalLM
    plain = plain_copy(folder, tmp_path_factory.mktemp("plain") / "model")
    return model.from_pretrained(plain, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rounded(reference: Any) -> RoundedReference:
    return RoundedReference(reference)


def encode_prompts(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [
        tokenizer.encode(opening.format(subject)).ids
        for subject in SUBJECTS
        for opening in OPENINGS
    ]


@pytest.mark.embedded
@pytest.mark.timeout(900)  # a minute where the cores are free; they may not be
def test_greedy_tokens_equal_transformers(
    folder: Path, reference: Any, kernels_of: Callable[[str | None], NativeKernels]
) -> None:
    """Each of our tokens is what transformers would pick after the ones before it: by induction
    the whole answer is the same. So one forward per answer is enough of the reference."""
    prompts = encode_prompts(folder)[::4]
    assert len(prompts) == 13
    native = kernels_of(LEVELS[0])
    decoder = load_decoder(folder, native=native)
    rig = decoder_rig(decoder, native=native, max_batch_size=13, max_length=64)
    rows = [rig.open(prompt) for prompt in prompts]
    rig.prefill(*rows)
    rig.decode(*rows, num_steps=NUM_NEW_TOKENS - 1)

    for begin in range(0, len(rows), 10):
        some = rows[begin : begin + 10]
        width = max(len(row.tokens) for row in some)
        ids = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in some])
        with torch.inference_mode():
            best = reference(ids).logits.argmax(-1)  # padding on the right changes nothing before
        for row, best_T in zip(some, best.tolist(), strict=True):
            start = row.num_prompt_tokens
            answer = row.tokens[start:]
            assert len(answer) == NUM_NEW_TOKENS
            assert answer == best_T[start - 1 : len(row.tokens) - 1]


@pytest.mark.embedded
@pytest.mark.parametrize("isa", first(LEVELS), scope="session")
def test_bfloat16_errs_no_more_than_transformers(
    folder: Path, rounded: RoundedReference, kernels: NativeKernels
) -> None:
    decoder = load_decoder(folder, dtype=torch.bfloat16, native=kernels)
    rig = decoder_rig(decoder, native=kernels, max_length=64)
    rows = [rig.open(prompt) for prompt in encode_prompts(folder)[::8]]
    rig.prefill(*rows)
    rig.decode(*rows, num_steps=4)
    rounded.assert_errs_no_more(rows)
