"""One GPU against its own limits and against diffusers: tokens, images, codecs.

    python samples/benchmarks/gpu.py --output figures.json            # about ten minutes on an H100
    python samples/benchmarks/gpu.py --parts tokens
    python samples/benchmarks/gpu.py --tiny --device cpu              # a test run on any machine

Models have random weights and published shapes. Limits are measured in the same run.

- Tokens: Llama 3.1 8B in bfloat16, by the engine in this process. Decode steps against the time to
  read every weight, and the cached keys and values, once; a prompt against the rate of a large
  product of matrices. Host waits are those that torch counts while rows decode.
- Images: FLUX.1's transformer between the embedded model's text encoders and autoencoder, at
  1024 x 1024, by the pipeline, against diffusers' own with `torch.compile`.
- Codecs: one frame for each of 64 streams, against decoding for each a window of that frame and
  the 72 before it, as a server without state does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import diffusers
import numpy as np
import torch
import transformers
from codec_streaming import LEFT_CONTEXT, make
from safetensors.torch import save_file

from triptych import ImagePipeline
from triptych.compose import build_engine
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.options.config import Config
from triptych.core.options.table import make_config
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import resolve_all
from triptych.modalities.diffusion.source import FOLDER
from triptych.modalities.tts.engine.codecs import adapter_for, build_decoder
from triptych.schedulers.local import LocalClient

Figures = dict[str, float]
FILE_BYTES = 4 * 2**30
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": False,
}
TINY_LLAMA = LLAMA_8B | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
FLUX_1 = {
    "num_layers": 19,
    "num_single_layers": 38,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The measured device. `tiny`: small shapes, for a test run."""

    device: torch.device
    tiny: bool
    scratch: Path
    repeats: int

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median_s(self, work: Callable[[], object], num_calls: int = 1) -> float:
        """Median seconds of a call, after a first call that warms up."""
        turns = []
        for _ in range(self.repeats + 1):
            self.wait()
            started_s = time.perf_counter()
            for _ in range(num_calls):
                work()
            self.wait()
            turns.append((time.perf_counter() - started_s) / num_calls)
        return statistics.median(turns[1:])


# ---- limits --------------------------------------------------------------------------------------


def limits(machine: Machine) -> Figures:
    """Bytes a second of reading, and operations a second of a product in bfloat16."""
    num_values = 2**20 if machine.tiny else 2**31
    side = 256 if machine.tiny else 8192
    read = torch.ones(num_values, dtype=torch.bfloat16, device=machine.device)
    a, b = (torch.randn(side, side, device=machine.device).bfloat16() for _ in range(2))
    read_s = machine.median_s(partial(torch.amax, read), 5)
    product_s = machine.median_s(partial(torch.matmul, a, b), 20)
    return {"read_bytes_per_s": read.nbytes / read_s, "flops_per_s": 2 * side**3 / product_s}


# ---- tokens --------------------------------------------------------------------------------------


class RandomFiles:
    """Shards of a checkpoint with random values.

    One block of them serves all tensors: generating twelve billion takes minutes, without effect on
    the results.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self._folder, self._stem = folder, stem
        self._block = torch.empty(2**24, dtype=torch.bfloat16).normal_(std=0.02)
        self._tensors: dict[str, torch.Tensor] = {}
        self._files: dict[str, str] = {}

    def write(self, module: torch.nn.Module) -> None:
        """Write values for all tensors of a module on the meta device."""
        for name, empty in module.state_dict().items():
            repeats = -(-empty.numel() // self._block.numel())
            values = self._block.repeat(repeats)[: empty.numel()].view(empty.shape)
            self._tensors[name] = torch.ones_like(values) if "norm" in name else values.clone()
            if sum(each.nbytes for each in self._tensors.values()) > FILE_BYTES:
                self._flush()
        self._flush()
        listed = {"metadata": {}, "weight_map": self._files}
        index = self._folder / f"{self._stem}.safetensors.index.json"
        index.write_text(json.dumps(listed), encoding="utf-8")

    def _flush(self) -> None:
        name = f"{self._stem}-{len(set(self._files.values())):05d}.safetensors"
        save_file(self._tensors, self._folder / name)
        self._files.update(dict.fromkeys(self._tensors, name))
        self._tensors.clear()


def write_llama(folder: Path, tiny: bool) -> transformers.LlamaConfig:
    """A folder with a language model of random weights; returns its shape."""
    folder.mkdir()
    shape = transformers.LlamaConfig(**(TINY_LLAMA if tiny else LLAMA_8B), dtype="bfloat16")
    shape.architectures = ["LlamaForCausalLM"]
    shape.save_pretrained(folder)
    RandomFiles(folder, "model").write(on_meta(shape))
    return shape


@dataclass(slots=True)
class Row:
    """The arrival times of a row's tokens."""

    times_s: list[float]


async def generate(client: LocalClient, length: int, num_tokens: int, index: int) -> Row:
    """One row of a random prompt."""
    ids = np.random.default_rng(index).integers(3, 500, length)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    request = TokenRequest(prompt_ids=tuple(ids.tolist()), sampling=sampling)
    row = Row([])
    async for output in client.submit("llama", request, job_id=f"{index}-{time.monotonic_ns()}"):
        if isinstance(output.payload, TokenDelta):
            now_s = time.perf_counter()
            row.times_s += [now_s] * len(output.payload.token_ids)
    return row


def step_s(rows: Sequence[Row]) -> float:
    """Seconds of a step while all rows decode."""
    begin = max(row.times_s[0] for row in rows)
    end = min(row.times_s[-1] for row in rows)
    found = [
        (within[-1] - within[0]) / (len(within) - 1)
        for row in rows
        if len(within := [at for at in row.times_s if begin <= at <= end]) > 1
    ]
    return statistics.median(found)


async def decode(
    machine: Machine, client: LocalClient, num_rows: int, length: int, num_tokens: int
) -> tuple[float, int]:
    """Median seconds of a step over repeats, and the host's waits in the last one."""
    found, waits = [], 0
    for turn in range(machine.repeats + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if machine.device.type == "cuda" and turn == machine.repeats:
                torch.cuda.set_sync_debug_mode("warn")
            rows = await asyncio.gather(
                *(
                    generate(client, length, num_tokens, 1000 * turn + index)
                    for index in range(num_rows)
                )
            )
            if machine.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        waits = sum("synchronizing" in str(each.message) for each in caught)
        found.append(step_s(rows))
    return statistics.median(found[1:]), waits


async def measure_tokens(machine: Machine, bounds: Figures) -> dict[str, Figures]:
    """Decode steps and a prompt, each as a share of its bound."""
    shape = await asyncio.to_thread(write_llama, machine.scratch / "llama", machine.tiny)
    config = token_config(machine)
    models = resolve_all(config.models, SilentProgress())
    client = LocalClient(build_engine(config, models))
    weights = sum(each.numel() for each in on_meta(shape).parameters())
    weights -= shape.vocab_size * shape.hidden_size  # of the embedding a step reads single rows
    kv_bytes = 4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    found: dict[str, Figures] = {}
    try:
        await client.load("llama")
        num_tokens = 16 if machine.tiny else 128
        for num_rows, length in ((1, 32), (64, 32)) if machine.tiny else ((1, 512), (64, 1024)):
            seconds, waits = await decode(machine, client, num_rows, length, num_tokens)
            num_bytes = 2 * weights + num_rows * (length + num_tokens / 2) * kv_bytes
            found[f"decode, {num_rows} rows of {length}"] = {
                "step_ms": 1e3 * seconds,
                "share_of_reading": num_bytes / bounds["read_bytes_per_s"] / seconds,
                "host_waits_per_step": waits / num_tokens,
            }
        found |= await prompt(machine, client, weights, bounds)
    finally:
        await client.close()
    return found


async def prompt(
    machine: Machine, client: LocalClient, weights: int, bounds: Figures
) -> dict[str, Figures]:
    """One long prompt, and the first token."""
    length = 64 if machine.tiny else 8192
    turns = []
    for turn in range(machine.repeats + 1):
        started_s = time.perf_counter()
        row = await generate(client, length, 1, 77_000 + turn)
        turns.append(row.times_s[0] - started_s)
    seconds = statistics.median(turns[1:])
    share = 2 * weights * length / bounds["flops_per_s"] / seconds
    return {f"prompt of {length}": {"ms": 1e3 * seconds, "share_of_products": share}}


def on_meta(shape: transformers.LlamaConfig) -> torch.nn.Module:
    """The model without its weights."""
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(shape)


def token_config(machine: Machine) -> Config:
    """The options of the engine: a server's defaults, and room for 64 rows."""
    return make_config(
        {
            "model": (f"llama={machine.scratch / 'llama'}",),
            "device": machine.device.type,
            "max_batch_size": 64,
            "cache_dir": str(machine.scratch / "cache"),
            "enable_prefix_caching": False,
        }
    )


# ---- codecs --------------------------------------------------------------------------------------


def measure_codecs(machine: Machine, names: Sequence[str] = ("mimi", "snac")) -> dict[str, Figures]:
    """A push of one frame for all streams, compared with a window for all streams."""
    num_rows = 4 if machine.tiny else 64
    found = {}
    for name in names:
        model = make(name, torch.float32).to(machine.device)
        decoder, adapter = build_decoder(model, num_rows=num_rows, verify=False), adapter_for(model)
        frame = adapter.probe_codes(num_rows, 1).to(machine.device)
        window = adapter.probe_codes(num_rows, LEFT_CONTEXT + 1).to(machine.device)
        rows = range(num_rows)
        decoder.init_state(rows)
        for _ in range(2 + 2 * decoder.latency // decoder.hop):
            decoder.push(frame, rows)
        push_s = machine.median_s(partial(decoder.push, frame, rows), 4)
        with torch.inference_mode():
            window_s = machine.median_s(partial(adapter.one_shot, window))
        found[name] = {"push_ms": 1e3 * push_s, "window_ms": 1e3 * window_s}
        found[name]["ratio"] = window_s / push_s
        del model, decoder, adapter
    return found


# ---- images --------------------------------------------------------------------------------------


def change(file: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Other values for some of a JSON file's fields; returns all."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) | fields
    file.write_text(json.dumps(found), encoding="utf-8")
    return found


def write_flux(folder: Path, tiny: bool) -> None:
    """The embedded image model's folder, with a transformer of FLUX.1's size."""
    shutil.copytree(FOLDER, folder)
    if tiny:
        return
    change(folder / "model_index.json", {"default_size": 1024})
    place = folder / "transformer"
    config = change(place / "config.json", FLUX_1)
    for file in place.glob("*.safetensors*"):
        file.unlink()
    with torch.device("meta"):
        module = diffusers.FluxTransformer2DModel.from_config(config)
    RandomFiles(place, "diffusion_pytorch_model").write(module)


def measure_images(machine: Machine) -> dict[str, Figures]:
    """Seconds of an image: ours without a cache and with the default one, and diffusers'."""
    folder = machine.scratch / "flux"
    write_flux(folder, machine.tiny)
    side, num_steps = (128, 4) if machine.tiny else (1024, 28)
    own = ImagePipeline.from_pretrained(
        str(folder), progress=False, dtype="bfloat16", device=machine.device.type
    )
    asked = {"num_steps": num_steps, "size": (side, side), "guidance_scale": 1.0}
    found = {}
    try:
        for cache in ("off", "taylorseer"):
            call = partial(own, "a red apple", seed=1, cache=cache, **asked)
            found[f"ours, cache {cache}"] = machine.median_s(call)
    finally:
        own.close()
    found["diffusers, compiled"] = machine.median_s(theirs(machine, folder, num_steps, side))
    first = found["diffusers, compiled"]
    return {name: {"s": seconds, "ratio": first / seconds} for name, seconds in found.items()}


def theirs(machine: Machine, folder: Path, num_steps: int, side: int) -> Callable[[], object]:
    """Diffusers' own pipeline, with its transformer compiled if that is fast."""
    pipe: Any = diffusers.FluxPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16)
    pipe = pipe.to(machine.device)
    pipe.set_progress_bar_config(disable=True)
    if not machine.tiny:
        pipe.transformer = torch.compile(pipe.transformer, mode="max-autotune-no-cudagraphs")
    return partial(
        pipe,
        "a red apple",
        num_inference_steps=num_steps,
        width=side,
        height=side,
        guidance_scale=1.0,
        max_sequence_length=32,
        output_type="pil",
    )


# ---- all -----------------------------------------------------------------------------------------


def versions(machine: Machine) -> dict[str, str]:
    """The device and the versions of the figures."""
    is_cuda = machine.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(machine.device) if is_cuda else platform.processor(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or torch.version.hip),
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def measure(part: str, machine: Machine, bounds: Figures) -> dict[str, Figures]:
    """One part's figures."""
    if part == "tokens":
        return asyncio.run(measure_tokens(machine, bounds))
    return measure_codecs(machine) if part == "codecs" else measure_images(machine)


PARTS = ("tokens", "codecs", "images")


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(torch.device(args.device), args.tiny, Path(scratch), args.repeats)
        bounds = limits(machine)
        figures: dict[str, Any] = {"versions": versions(machine), "limits": bounds}
        print(figures, flush=True)
        for part in args.parts:
            figures[part] = measure(part, machine, bounds)
            for name, found in figures[part].items():
                shown = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
                print(f"{part}, {name}: {shown}", flush=True)
            if args.output:  # after each: a part that fails leaves the others' figures
                args.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
