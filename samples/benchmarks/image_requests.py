"""Concurrent image requests: the engine against diffusers' pipeline, and the engine's overhead.

    python samples/benchmarks/image_requests.py --output docs/benchmarks

Everything runs in one process, taking turns, on the embedded model.

- Together: eight concurrent requests with different seeds and numbers of steps, through the engine
  with its plans, against diffusers' pipeline, uncached, one after the other. The images are
  compared with the engine's own uncached ones.
- Batching: the same eight without a cache, concurrently and one after the other, against one model
  run with a batch of eight and eight runs of one: the upper bound.
- Loop: one image of a larger model with random weights, against as many bare calls of its
  transformer.
- Previews: an image over HTTP with three previews and without, and the time to the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import openai
import torch
import transformers
from chat_cpu import free_port, server, wait_until_ready
from rich.console import Console
from rich.table import Table
from step_caches.measures import psnr_db
from step_caches.subject import ImageSpec

from triptych import ImagePipeline
from triptych.modalities.diffusion.api.pipeline import GeneratedImage
from triptych.modalities.diffusion.source import FOLDER

STEPS = (50, 28, 20, 50, 28, 20, 50, 28)
ASKED = tuple(
    ImageSpec(f"{thing} on a white background", seed)
    for seed, thing in enumerate(
        ("a red apple", "a penguin", "a house", "a blue car", "a dog", "a cat", "a tree", "a sun")
    )
)
SIDE = 128
GUIDANCE = json.loads((FOLDER / "model_index.json").read_text(encoding="utf-8"))["default_guidance"]
_BATCH = len(ASKED)


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def taking_turns(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each side, run in turns after a warm-up."""
    for work in sides.values():
        work()
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, work in sides.items():
            found[name].append(seconds_of(work))
    return found


class Ours:
    """Our pipeline, with concurrent or sequential requests."""

    def __init__(self, model: str = "embedded", dtype: str = "auto") -> None:
        self._pipeline = ImagePipeline.from_pretrained(model, progress=False, dtype=dtype)

    def at_once(
        self, asked: Sequence[ImageSpec], steps: Sequence[int], cache: str, **options: Any
    ) -> list[GeneratedImage]:
        """All images, requested concurrently."""

        async def generate() -> list[list[GeneratedImage]]:
            calls = [
                self._pipeline.acall(
                    spec.prompt, seed=spec.seed, num_steps=number, cache=cache, **options
                )
                for spec, number in zip(asked, steps, strict=True)
            ]
            return await asyncio.gather(*calls)

        return [images[0] for images in asyncio.run(generate())]

    def in_turn(
        self, asked: Sequence[ImageSpec], steps: Sequence[int], cache: str, **options: Any
    ) -> list[GeneratedImage]:
        """All images, each requested when the one before it is done."""
        return [
            self._pipeline(spec.prompt, seed=spec.seed, num_steps=number, cache=cache, **options)[0]
            for spec, number in zip(asked, steps, strict=True)
        ]

    def close(self) -> None:
        """Stop its engine."""
        self._pipeline.close()


class Theirs:
    """diffusers' own pipeline, uncached, in the dtype of the stored weights."""

    def __init__(self) -> None:
        self.pipe: Any = diffusers.DiffusionPipeline.from_pretrained(
            FOLDER, torch_dtype=torch.bfloat16
        )
        self.pipe.set_progress_bar_config(disable=True)

    def in_turn(self, asked: Sequence[ImageSpec], steps: Sequence[int]) -> None:
        """All images, one after the other."""
        for spec, number in zip(asked, steps, strict=True):
            self.pipe(
                spec.prompt,
                negative_prompt="",
                true_cfg_scale=GUIDANCE,
                height=SIDE,
                width=SIDE,
                num_inference_steps=number,
                max_sequence_length=self.pipe.tokenizer_2.model_max_length,
                generator=torch.Generator().manual_seed(spec.seed),
            )

    def run(self, num_rows: int) -> None:
        """A bare run of the transformer."""
        transformer = self.pipe.transformer
        with torch.inference_mode():
            transformer(**flux_inputs(transformer, num_rows, num_tokens=64, num_words=32))


def flux_inputs(transformer: Any, num_rows: int, num_tokens: int, num_words: int) -> dict[str, Any]:
    """Random arguments of a FLUX transformer."""
    config = transformer.config
    dtype = transformer.dtype
    arguments = {
        "hidden_states": torch.randn(num_rows, num_tokens, config.in_channels, dtype=dtype),
        "encoder_hidden_states": torch.randn(
            num_rows, num_words, config.joint_attention_dim, dtype=dtype
        ),
        "pooled_projections": torch.randn(num_rows, config.pooled_projection_dim, dtype=dtype),
        "timestep": torch.full((num_rows,), 0.5, dtype=dtype),
        "img_ids": torch.zeros(num_tokens, 3),
        "txt_ids": torch.zeros(num_words, 3),
        "return_dict": False,
    }
    if config.guidance_embeds:
        arguments["guidance"] = torch.full((num_rows,), 3.5, dtype=torch.float32)
    return arguments


def together(ours: Ours, theirs: Theirs, repeats: int) -> dict[str, Any]:
    """Eight requests with mixed steps, against the pipeline."""
    sides = {
        "ours": lambda: ours.at_once(ASKED, STEPS, "auto"),
        "diffusers": lambda: theirs.in_turn(ASKED, STEPS),
    }
    seconds = taking_turns(sides, repeats)
    planned = ours.at_once(ASKED, STEPS, "auto")
    whole = ours.at_once(ASKED, STEPS, "off")
    return {
        "seconds": seconds,
        "psnr_db": psnr_db(_values(planned), _values(whole)),
        "computed": [image.num_computed for image in planned],
    }


def batching(ours: Ours, theirs: Theirs, repeats: int) -> dict[str, list[float]]:
    """Eight uncached requests of 28 steps, concurrent and sequential, and bare model runs.

    Without guidance, so that a request is one row.
    """
    steps = [28] * _BATCH
    sides: dict[str, Callable[[], Any]] = {
        "at once": lambda: ours.at_once(ASKED, steps, "off", guidance_scale=1.0),
        "in turn": lambda: ours.in_turn(ASKED, steps, "off", guidance_scale=1.0),
        "bare, 8 rows": lambda: [theirs.run(_BATCH) for _ in range(28)],
        "bare, 8 times 1 row": lambda: [theirs.run(1) for _ in range(28 * _BATCH)],
    }
    return taking_turns(sides, repeats)


def build_larger(folder: Path) -> None:
    """The embedded model's folder, with a transformer of FLUX's width at small depth: 90 M."""
    torch.manual_seed(0)
    pipe = diffusers.DiffusionPipeline.from_pretrained(FOLDER)
    config = dict(pipe.transformer.config)
    config |= {
        "num_attention_heads": 12,
        "attention_head_dim": 64,
        "num_layers": 3,
        "num_single_layers": 6,
        "axes_dims_rope": (16, 24, 24),
    }
    pipe.transformer = diffusers.FluxTransformer2DModel.from_config(config).to(torch.bfloat16)
    pipe.save_pretrained(folder)


def loop(folder: Path, repeats: int) -> dict[str, list[float]]:
    """One image of the larger model through the engine, against bare calls of its transformer."""
    num_steps, side = 12, 512
    build_larger(folder)
    pipeline = ImagePipeline.from_pretrained(str(folder), progress=False)
    bare = diffusers.FluxTransformer2DModel.from_pretrained(
        folder / "transformer", torch_dtype=torch.bfloat16
    )
    num_tokens = (side // 16) ** 2

    def run_bare() -> None:
        with torch.inference_mode():
            for _ in range(num_steps):
                bare(**flux_inputs(bare, 1, num_tokens, num_words=32))

    def steps_only() -> float:
        """From the first step's end to the last one's, scaled to all of them."""
        times = [
            time.perf_counter()
            for progress in pipeline.stream(
                "a", size=(side, side), num_steps=num_steps, cache="off", guidance_scale=1.0
            )
            if progress.step and progress.image is None
        ]
        return (times[-1] - times[0]) / (len(times) - 1) * num_steps

    steps_only()
    run_bare()
    found: dict[str, list[float]] = {"engine": [], "bare": []}
    for _ in range(repeats):
        found["engine"].append(steps_only())
        found["bare"].append(seconds_of(run_bare))
    pipeline.close()
    return found


def previews(repeats: int, log: Path) -> dict[str, list[float]]:
    """Images over HTTP with and without previews."""
    found: dict[str, list[float]] = {"with": [], "without": [], "first preview": []}
    port = free_port()
    with server(f"triptych serve --port {port} --model triptych-images --log-level warning", log):
        wait_until_ready(f"http://127.0.0.1:{port}/readyz")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        for number in range(repeats + 1):
            for name, partials in (("with", 3), ("without", 0)):
                started_s = time.perf_counter()
                stream = client.images.generate(
                    model="triptych-images",
                    prompt="a red apple",
                    stream=True,
                    partial_images=partials,
                    extra_body={"seed": number, "steps": 50, "cache": "off"},
                )
                times = [
                    (event.type, time.perf_counter() - started_s)
                    for event in stream
                    if "progress" not in event.type
                ]
                if number:
                    found[name].append(times[-1][1])
                    if partials:
                        found["first preview"].append(times[0][1])
    return found


def _values(images: Sequence[GeneratedImage]) -> torch.Tensor:
    """`[B, H, W, C]` in 0..1."""
    return torch.stack([torch.from_numpy(np.array(each.image)) / 255 for each in images])


def _ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """Median, minimum and maximum of the paired ratios."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def report(found: dict[str, Any]) -> Table:
    """A row per question."""
    table = Table("", "median", "lowest", "highest")

    def add(name: str, values: tuple[float, float, float]) -> None:
        table.add_row(name, *(f"{value:.3g}" for value in values))

    both = found["together"]["seconds"]
    add("eight requests: times as fast as diffusers", _ratio(both["diffusers"], both["ours"]))
    psnrs = found["together"]["psnr_db"]
    add("  PSNR to uncached, dB", (statistics.median(psnrs), min(psnrs), max(psnrs)))
    turns = found["batching"]
    gain = _ratio(turns["in turn"], turns["at once"])
    ceiling = _ratio(turns["bare, 8 times 1 row"], turns["bare, 8 rows"])
    add("batching alone: times as fast as in turn", gain)
    add("  the same of bare runs", ceiling)
    add("  share of that reached", _shares(turns))
    add("loop: time over bare calls", _ratio(found["loop"]["engine"], found["loop"]["bare"]))
    seen = found["previews"]
    add("previews: time with over without", _ratio(seen["with"], seen["without"]))
    add("  first preview, share of the time", _ratio(seen["first preview"], seen["with"]))
    return table


def _shares(turns: dict[str, list[float]]) -> tuple[float, float, float]:
    gains = [a / b for a, b in zip(turns["in turn"], turns["at once"], strict=True)]
    most = [a / b for a, b in zip(turns["bare, 8 times 1 row"], turns["bare, 8 rows"], strict=True)]
    return _ratio(gains, most)


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder for image_requests.json")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    ours, theirs = Ours(), Theirs()
    found: dict[str, Any] = {
        "together": together(ours, theirs, args.repeats),
        "batching": batching(ours, theirs, args.repeats),
    }
    ours.close()
    with tempfile.TemporaryDirectory() as folder:
        found["loop"] = loop(Path(folder) / "larger", args.repeats)
        found["previews"] = previews(2 * args.repeats, Path(folder) / "server.log")
    Console().print(report(found))
    if args.output:
        path = args.output / "image_requests.json"
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
