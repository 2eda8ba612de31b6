"""Streaming speech on the CPU against transformers' generate-then-decode, on the same weights.

    python samples/benchmarks/speech_streams.py --output docs/benchmarks
    python samples/benchmarks/speech_streams.py --codebooks 8 --live 3 --output docs/benchmarks

The model is a small CSM with random weights: speed does not depend on training. Backbone, depth
decoder over CSM's 32 codebooks (or fewer), and Mimi at its published size, all in bfloat16. Both
sides generate the same number of frames, in one process, taking turns.

- Time to first audio: one listener requests five seconds; transformers returns all of it at the
  end.
- Throughput: eight listeners request a sentence each, concurrently.
- Underruns: a few listeners request several sentences, one after another. transformers serves one
  sentence at a time, in the order of their deadlines, the best that a server around `generate` can
  do. A listener plays audio as it arrives; underruns are the time without audio between the first
  and the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.options.config import (
    CacheOptions,
    Config,
    ModelOptions,
    ScheduleOptions,
    SpeechOptions,
)
from triptych.core.runtime.devices.device import open_device
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.engine.loader import open_speech_loader
from triptych.modalities.tts.wire import SpeechDelta, SpeechRequest, SpeechSegment
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.local import LocalClient

FRAME_S = 0.08
NUM_FRAMES = 63
SENTENCE_FRAMES = 20
NUM_LISTENERS = 8
PROMPT = tuple(range(10, 42))
LAYERS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One listener's record: seconds since the request, and seconds of audio each time."""

    times_s: tuple[float, ...]
    sound_s: tuple[float, ...]

    @property
    def first_s(self) -> float:
        """Time to first audio."""
        return self.times_s[0]

    @property
    def underrun_s(self) -> float:
        """Time without audio after playback began."""
        plays_until, silent = self.times_s[0], 0.0
        for now, length in zip(self.times_s, self.sound_s, strict=True):
            silent += max(0.0, now - plays_until)
            plays_until = max(plays_until, now) + length
        return silent


def build(folder: Path, num_codebooks: int) -> transformers.CsmForConditionalGeneration:
    """A small CSM with random weights, saved into `folder`."""
    torch.manual_seed(0)
    config = transformers.CsmConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_codebooks=num_codebooks,
        vocab_size=2048,  # Mimi's; the larger one of the release has codes that are never decoded
        codebook_pad_token_id=2047,
        text_vocab_size=1024,
        pad_token_id=1022,
        audio_token_id=1022,
        audio_eos_token_id=1023,
        bos_token_id=1,
        codec_config={"model_type": "mimi", "num_quantizers": num_codebooks},
        max_position_embeddings=1024,
        depth_decoder_config={
            "num_codebooks": num_codebooks,
            "vocab_size": 2048,
            "max_position_embeddings": num_codebooks + 1,
            "backbone_hidden_size": 512,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
        **LAYERS,
    )
    model = transformers.CsmForConditionalGeneration(config).eval().bfloat16()
    model.save_pretrained(folder)
    return model


class Peer:
    """transformers: generate a whole sentence, then decode it."""

    def __init__(self, model: transformers.CsmForConditionalGeneration) -> None:
        self._model = model

    @torch.inference_mode()
    def say(self, num_frames: int, seed: int) -> float:
        """Seconds of audio generated."""
        torch.manual_seed(seed)
        (pcm_S,) = self._model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=num_frames,
            min_new_tokens=num_frames,
            do_sample=True,
            depth_decoder_do_sample=True,
            output_audio=True,
        )
        return float(pcm_S.numel() / 24_000)

    def one(self, num_frames: int) -> Heard:
        """Serve one listener."""
        started_s = time.perf_counter()
        length = self.say(num_frames, seed=0)
        return Heard(times_s=(time.perf_counter() - started_s,), sound_s=(length,))

    def crowd(self, num_listeners: int, num_sentences: int) -> list[Heard]:
        """Sentences in a row, for the listener whose buffer is empty first."""
        started_s = time.perf_counter()
        times: list[list[float]] = [[] for _ in range(num_listeners)]
        sound: list[list[float]] = [[] for _ in range(num_listeners)]
        for sentence in range(num_sentences):
            for listener in range(num_listeners):
                sound[listener].append(self.say(SENTENCE_FRAMES, seed=sentence))
                times[listener].append(time.perf_counter() - started_s)
        return [
            Heard(times_s=tuple(t), sound_s=tuple(s)) for t, s in zip(times, sound, strict=True)
        ]


class Ours:
    """The engine, as behind the server and the pipeline."""

    def __init__(self, client: LocalClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._num_jobs = 0

    def one(self, num_frames: int) -> Heard:
        """Serve one listener."""
        return self._loop.run_until_complete(self._listen(1, num_frames, seed=0))

    def crowd(self, num_listeners: int, num_sentences: int) -> list[Heard]:
        """All listeners at once."""
        listeners = (
            self._listen(num_sentences, SENTENCE_FRAMES, seed=seed) for seed in range(num_listeners)
        )

        async def together() -> list[Heard]:
            return list(await asyncio.gather(*listeners))

        return self._loop.run_until_complete(together())

    async def _listen(self, num_sentences: int, num_frames: int, *, seed: int) -> Heard:
        segment = SpeechSegment(prompt_ids=PROMPT, max_steps=num_frames)
        sampling = SamplingParams(temperature=1.0, top_k=50, min_tokens=num_frames, seed=seed)
        request = SpeechRequest(segments=(segment,) * num_sentences, sampling=sampling)
        self._num_jobs += 1
        started_s = time.perf_counter()
        times, sound = [], []
        async for output in self._client.submit("csm", request, job_id=str(self._num_jobs)):
            delta = output.payload
            if isinstance(delta, SpeechDelta) and delta.pcm:
                times.append(time.perf_counter() - started_s)
                sound.append(len(delta.pcm) / 4 / 24_000)
        return Heard(times_s=tuple(times), sound_s=tuple(sound))


@contextmanager
def our_engine(folder: Path) -> Iterator[Ours]:
    """The model of `folder` on our engine."""
    config = Config(
        models=ModelOptions(model=(str(folder),)),
        cache=CacheOptions(enable_prefix_caching=False),
        schedule=ScheduleOptions(max_batch_size=NUM_LISTENERS),
        speech=SpeechOptions(max_streams=NUM_LISTENERS),
    )
    device, ledger = open_device(config.device)
    resolved = ResolvedModel(name="csm", reference="csm", folder=str(folder), digest="random")
    loader = open_speech_loader(resolved, config, device, ledger)
    loop = asyncio.new_event_loop()
    client = LocalClient(EngineCore([loader], config=config, ledger=ledger))
    try:
        loop.run_until_complete(client.load("csm"))
        yield Ours(client, loop)
    finally:
        loop.run_until_complete(client.close())
        loop.close()


Figures = dict[str, dict[str, list[float]]]


def measure(args: argparse.Namespace) -> Figures:
    """Every figure of every repeat, ours and theirs."""
    figures: Figures = {"triptych": {}, "transformers": {}}
    with (
        tempfile.TemporaryDirectory() as name,
        our_engine_and_peer(Path(name), args.codebooks) as sides,
    ):
        for side in sides.values():
            side.one(8)  # the first call compiles and pages in
        for _ in range(args.repeats):
            for label, side in sides.items():
                heard = side.crowd(NUM_LISTENERS, 1)
                live = side.crowd(args.live, args.sentences)
                found = {
                    "first_s": side.one(NUM_FRAMES).first_s,
                    "sound_per_s": sum(sum(h.sound_s) for h in heard)
                    / max(h.times_s[-1] for h in heard),
                    "silence_s": sum(h.underrun_s for h in live),
                }
                for key, value in found.items():
                    figures[label].setdefault(key, []).append(value)
    return figures


@contextmanager
def our_engine_and_peer(folder: Path, num_codebooks: int) -> Iterator[dict[str, Ours | Peer]]:
    """Both sides on the same weights."""
    peer = Peer(build(folder, num_codebooks))
    with our_engine(folder) as ours:
        yield {"triptych": ours, "transformers": peer}


def report(figures: Figures, num_live: int) -> Table:
    """Medians with their spread, and the ratios."""
    ours, theirs = figures["triptych"], figures["transformers"]
    rows = {
        "time to first audio of 5 s, s": ("first_s", True),
        f"{NUM_LISTENERS} listeners: audio per second, s": ("sound_per_s", False),
        f"{num_live} listening to sentences in a row: underruns, s": ("silence_s", None),
    }
    table = Table("", "Triptych", "transformers", "ratio")
    for title, (key, is_less_better) in rows.items():
        ratio = ""
        if is_less_better is not None:
            pairs = zip(ours[key], theirs[key], strict=True)
            ratios = [t / o if is_less_better else o / t for o, t in pairs]
            ratio = f"{_spread(ratios)} times {'lower' if is_less_better else 'higher'}"
        table.add_row(title, _spread(ours[key]), _spread(theirs[key]), ratio)
    return table


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--codebooks", type=int, default=32)
    parser.add_argument("--live", type=int, default=1, help="listeners to sentences in a row")
    parser.add_argument("--sentences", type=int, default=3, help="of each of them")
    parser.add_argument("--output", type=Path, help="folder for the figures")
    args = parser.parse_args()
    figures = measure(args)
    Console().print(report(figures, args.live))
    if args.output:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        document = {"versions": versions, "figures": figures}
        path = args.output / f"speech_streams_{args.codebooks}.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
