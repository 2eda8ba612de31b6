"""What windows hold and what of them is given out, on a codec whose sound shows its input."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from triptych.core.errors import ConfigError
from triptych.core.options.config import SpeechOptions
from triptych.modalities.tts.engine.codecs.loading import window_policy
from triptych.modalities.tts.engine.codecs.protocol import CodecDecoder
from triptych.modalities.tts.engine.codecs.window import (
    OneShotCodec,
    PromptUse,
    WindowDecoder,
    WindowPolicy,
)

HOP = 2
PROMPT = (91, 92, 93, 94)


class Spy:
    """Each frame sounds as its code; keeps every window."""

    def __init__(self) -> None:
        self.windows: list[list[int]] = []

    def decode(self, codes_BQF: torch.Tensor) -> torch.Tensor:
        self.windows += codes_BQF[:, 0].tolist()
        return codes_BQF[:, 0].float().repeat_interleave(HOP, 1)


def decoder(spy: Spy, **policy: object) -> WindowDecoder:
    codec = OneShotCodec(decode=spy.decode, num_codebooks=1, sample_rate=100, hop=HOP)
    return WindowDecoder(codec, WindowPolicy(**policy), num_rows=4)


def frames(*codes: int) -> torch.Tensor:
    return torch.tensor([[codes]])


def speak(spy: Spy, chunks: Sequence[int], **policy: object) -> list[float]:
    """The sound of codes 1, 2, 3, ... in chunks of so many, after the prompt."""
    window = decoder(spy, **policy)
    window.init_state([0])
    window.prime(0, frames(*PROMPT)[0])
    codes = iter(range(1, sum(chunks) + 1))
    sound: list[float] = []
    for size in chunks:
        sound += window.push(frames(*(next(codes) for _ in range(size))), [0]).row(0).tolist()
    return sound + window.flush([0]).row(0).tolist()


@pytest.mark.parametrize(
    ("policy", "windows"),
    [
        ({}, [[1], [2, 3], [4, 5], [6]]),
        ({"buffer": 2}, [[1], [1, 2, 3], [2, 3, 4, 5], [4, 5, 6]]),
        ({"prompt_use": PromptUse.ONCE}, [[*PROMPT, 1], [2, 3], [4, 5], [6]]),
        (
            {"buffer": 2, "prompt_use": PromptUse.ONCE},
            [[*PROMPT, 1], [1, 2, 3], [2, 3, 4, 5], [4, 5, 6]],
        ),
        (
            {"buffer": 4, "prompt_use": PromptUse.ROLLING},
            [[*PROMPT, 1], [92, 93, 94, 1, 2, 3], [94, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6]],
        ),
        ({"prompt_use": PromptUse.ROLLING}, [[*PROMPT, 1], [2, 3], [4, 5], [6]]),
        (
            {"buffer": 9, "prompt_use": PromptUse.ROLLING},
            [[*PROMPT, 1], [*PROMPT, 1, 2, 3], [*PROMPT, *range(1, 6)], [*PROMPT, *range(1, 7)]],
        ),
    ],
)
def test_a_window_is_its_chunk_and_what_is_before_it(
    policy: dict[str, object], windows: list[list[int]]
) -> None:
    spy = Spy()
    sound = speak(spy, [1, 2, 2, 1], **policy)
    assert spy.windows == windows
    assert sound == [float(code) for code in range(1, 7) for _ in range(HOP)]


def test_windows_of_one_shape_are_decoded_together_and_never_padded() -> None:
    spy = Spy()
    window = decoder(spy, buffer=1)
    window.init_state([0, 1, 2])
    codes = torch.tensor([[[1, 2, 3]], [[4, 5, 6]], [[7, 0, 0]]])
    audio = window.push(codes, [0, 1, 2], [3, 3, 1])
    assert sorted(map(len, spy.windows)) == [1, 3, 3]
    assert [audio.row(i).tolist()[::HOP] for i in range(3)] == [[1, 2, 3], [4, 5, 6], [7]]
    audio = window.push(codes[:2], [1, 2], [0, 2])
    assert audio.row(0).tolist() == []
    assert spy.windows[-1] == [7, 4, 5]


def test_a_row_without_frames_does_not_change_the_others() -> None:
    def decode(codes_BQF: torch.Tensor) -> torch.Tensor:
        return codes_BQF[:, 0].double().repeat_interleave(HOP, 1) / 3

    codec = OneShotCodec(decode=decode, num_codebooks=1, sample_rate=100, hop=HOP)
    window = WindowDecoder(codec, WindowPolicy(), num_rows=2)
    window.init_state([0, 1])
    audio = window.push(torch.tensor([[[5]], [[1]]]), [0, 1], [0, 1])
    assert audio.pcm_BS.dtype == torch.float64
    assert audio.row(1).tolist() == [1 / 3] * HOP


def test_what_fails_to_decode_is_not_past() -> None:
    spy, is_broken = Spy(), False

    def decode(codes_BQF: torch.Tensor) -> torch.Tensor:
        if is_broken:
            raise torch.OutOfMemoryError
        return spy.decode(codes_BQF)

    codec = OneShotCodec(decode=decode, num_codebooks=1, sample_rate=100, hop=HOP)
    window = WindowDecoder(codec, WindowPolicy(buffer=1), num_rows=1)
    window.init_state([0])
    window.push(frames(1), [0])
    is_broken = True
    with pytest.raises(torch.OutOfMemoryError):
        window.push(frames(2), [0])
    is_broken = False
    window.push(frames(2, 3), [0])
    assert spy.windows[-1] == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (SpeechOptions(buffer=2, block_causal=True), "block_causal"),
        (
            SpeechOptions(
                prepend_prompt_speech_tokens="once", prepend_prompt_speech_tokens_causal=True
            ),
            "prepend_prompt_speech_tokens_causal",
        ),
    ],
)
def test_a_causal_context_is_refused(options: SpeechOptions, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}:"):
        window_policy(options)


def test_it_is_a_codec_decoder() -> None:
    assert isinstance(decoder(Spy()), CodecDecoder)
