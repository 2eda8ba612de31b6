"""Models that see, and models that embed and rank texts, on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from agreement import Figures, Tokens, apart_in_logprobs, same_tokens, share_apart, vectors
from engines import Answer, Waves
from modality_text import LIKELY
from model_case import FLOAT32_LIMIT, Ask, EngineCase, in_both, in_type, must

from support.embedding_models import FAMILIES as ENCODERS
from support.embedding_models import save as save_encoder
from support.embedding_models import save_cross_encoder, save_decoder
from support.image_prompts import join_prompt
from support.text_models import byte_tokenizer
from support.vision_models import MODELS, encode, pixels
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.modalities.embedding.wire import EmbedRequest
from triptych.modalities.vlm.processing.processor import ImageProcessor

TEXT = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.08,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
AXES = {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
TOWER = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "num_attention_heads": 2}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": (TEXT, TOWER),
    "gemma3": (TEXT | {"head_dim": 256, "query_pre_attn_scalar": 256}, TOWER),
    "qwen2_5_vl": (
        TEXT | {"rope_parameters": ROPE | {"mrope_section": [8, 12, 12]}},
        TOWER | {"out_hidden_size": 256},
    ),
    "qwen3_vl": (
        TEXT | {"rope_parameters": ROPE | AXES},
        TOWER | {"out_hidden_size": 256},
    ),
}
"""The fields of text and tower that make a tiny model of tests one with heads of usual sizes."""
FORCED = SamplingParams(temperature=0.0, logit_bias=((21, 100.0),), max_tokens=16, top_logprobs=20)


def save(family: str, folder: Path) -> None:
    """A random model, its image processor, and a tokenizer for what needs one."""
    text, tower = FAMILIES[family]
    config, images = MODELS[family]()
    for part, fields in ((config.text_config, text), (config.vision_config, tower)):
        for name, value in fields.items():
            if hasattr(part, name):
                setattr(part, name, value)
    transformers.set_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    images.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))


def looks(sampling: SamplingParams, folder: Path) -> Waves:
    """Images of several sizes with text around them; then one of them again."""
    processor = ImageProcessor.open(folder, model="00")

    def row(*sizes: tuple[int, int], first: int = 3) -> TokenRequest:
        parts: list[Any] = [range(first, first + 9)]
        for number, size in enumerate(sizes):
            parts += [processor.prepare(pixels(*size, seed=number)), (6, 7)]
        prompt = join_prompt(parts, encode)
        return TokenRequest(prompt_ids=prompt.prompt_ids, contents=prompt.images, sampling=sampling)

    return [row((40, 56)), row((28, 28), (56, 28)), row()], [row((40, 56), first=10)]


def equal_looks(ask: Ask) -> Figures:
    """Every token in float32, and an image that was not encoded again."""
    got = ask(dtype="float32")
    found = same_tokens(got, ask(is_reference=True, dtype="float32"), FLOAT32_LIMIT)
    found["cached images"] = Tokens.of(got[-1]).num_cached_contents
    must(found["cached images"] == 1, "the image was encoded twice")
    return found


def _sight(family: str) -> Sequence[EngineCase]:
    options = {"max_batch_input_tokens": 64, "max_batch_size": 8, "kv_cache_page_size": 16}
    equal = EngineCase(
        name=f"vision, {family}, float32",
        write=partial(save, family),
        requests=partial(looks, LIKELY),
        compare=equal_looks,
        options=options,
    )
    forced = EngineCase(
        name=f"vision, {family}, bfloat16",
        write=partial(save, family),
        requests=partial(looks, FORCED),
        compare=in_type(apart_in_logprobs),
        options=options,
    )
    return equal, forced


# ---- vectors -------------------------------------------------------------------------------------

TEXTS = tuple(tuple(range(4, 4 + length)) for length in (1, 9, 3, 31, 2, 17))
PAIRS = tuple((1, *range(4, 4 + size), 2, *range(9, 9 + size), 2) for size in (2, 7, 11))


def texts(folder: Path) -> Waves:
    """Texts of several lengths, in two requests."""
    return ([EmbedRequest(texts=TEXTS), EmbedRequest(texts=TEXTS[::-1])],)


def pairs(folder: Path) -> Waves:
    """Pairs of a question and a document."""
    starts = tuple(len(pair) // 2 + 1 for pair in PAIRS)
    return ([EmbedRequest(texts=PAIRS, second_starts=starts)],)


def apart(got: Sequence[Answer], wanted: Sequence[Answer]) -> float:
    """The error of vectors or scores."""
    return share_apart(vectors(got, "vectors"), vectors(wanted, "vectors"))


def states(folder: Path) -> Waves:
    """The same texts for a decoder, whose final states are the vectors."""
    sampling = SamplingParams(max_tokens=1, returns_state=True)
    return ([TokenRequest(prompt_ids=text, sampling=sampling) for text in TEXTS],)


def apart_in_states(got: Sequence[Answer], wanted: Sequence[Answer]) -> float:
    """The error of final states."""
    return share_apart(vectors(got, "state"), vectors(wanted, "state"))


def _vectors(
    name: str, write: Callable[[Path], object], requests: Callable[[Path], Waves] = texts
) -> EngineCase:
    return EngineCase(name=name, write=write, requests=requests, compare=in_both(apart))


def _save_encoder(kind: str, folder: Path) -> None:
    save_encoder(folder, kind)


def _save_judge(kind: str, folder: Path) -> None:
    save_cross_encoder(folder, kind)


CASES: Sequence[EngineCase] = (
    *(case for family in FAMILIES for case in _sight(family)),
    *(_vectors(f"embeddings, {kind}", partial(_save_encoder, kind)) for kind in ENCODERS),
    EngineCase(
        name="embeddings, qwen3",
        write=partial(save_decoder, has_modules=True),
        requests=states,
        compare=in_both(apart_in_states),
    ),
    *(
        _vectors(f"ranking, {kind}", partial(_save_judge, kind), pairs)
        for kind in ("bert", "modernbert")
    ),
)
