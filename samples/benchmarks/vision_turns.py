"""Ten turns over one large image: the effect of the vision cache and the prefix cache.

    pip install -e '.[bench]' 'transformers[serving]'
    python samples/benchmarks/vision_turns.py --output docs/benchmarks

Starts `triptych serve` with both caches, with each alone and with none, and `transformers serve`,
all on the same weights. A conversation about an image grows turn by turn. Each turn is sent to
every server before the next one; the time is that of a one-token answer. Each repeat has a new
image.

The embedded model's encoding time is negligible, so this model has the shape of SmolVLM-256M and
random weights: speed depends only on shapes. Its answers are meaningless.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import shlex
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from chat_cpu import free_port, server, wait_until_ready
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken

from triptych.core.bundle.resolve import resolve_all
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import SilentProgress

SIDE = 512
_BEAT_S = 1.0
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIALS = ["<fake_token_around_image>", "<image>", "<global-img>", *_TILES]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CACHES = {
    "both caches": "",
    "vision cache alone": "--no-enable-prefix-caching",
    "prefix cache alone": "--max-vision-cache-entries 0",
    "no cache": "--max-vision-cache-entries 0 --no-enable-prefix-caching",
}
THEIRS = "transformers serve"
QUESTION = "What is to be seen in this picture, and where in it?"
NEXT = "And what is beside it, to the left and to the right?"
ANSWER = "There is a house on a hill, and a tree beside it; the sky is clear."


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the tower and of the language model."""

    tower: dict[str, int]
    text: dict[str, int]


SMOLVLM = Shape(
    {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    | {"num_attention_heads": 12, "patch_size": 16},
    {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3},
)
TINY = Shape(
    {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "patch_size": 64},
    {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "num_key_value_heads": 2},
)


def build_model(folder: Path, shape: Shape) -> None:
    """A model with random weights: Idefics3 (as SmolVLM-256M), the embedded model's tokenizer."""
    (text,) = resolve_all(ModelOptions(), SilentProgress())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(Path(text.folder) / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIALS])
    scale = 4
    config = transformers.Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 8192,
            "eos_token_id": tokenizer.eos_token_id,
            **shape.text,
        },
        vision_config={"image_size": SIDE, **shape.tower},
        scale_factor=scale if shape is SMOLVLM else 1,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(0)
    model = transformers.Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    side = SIDE // shape.tower["patch_size"] // config.scale_factor
    transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 4 * SIDE}, max_image_size={"longest_edge": SIDE}
        ),
        tokenizer,
        image_seq_len=side**2,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def photograph(number: int, width: int, height: int, quality: int = 85) -> bytes:
    """A JPEG of noise that compresses like a photograph."""
    file = io.BytesIO()
    shifted = np.roll(_landscape(width, height), 64 * number, axis=1)
    Image.fromarray(shifted).save(file, "jpeg", quality=quality)
    return file.getvalue()


@lru_cache(maxsize=1)
def _landscape(width: int, height: int) -> NDArray[np.uint8]:
    """Smooth colours, and grain."""
    noise = np.random.default_rng(0)
    coarse = Image.fromarray(noise.integers(0, 256, (height // 50, width // 50, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    grain = noise.integers(-24, 25, (height, width, 1), dtype=np.int16)
    return np.clip(smooth + grain, 0, 255).astype(np.uint8)


def conversation(image: bytes, num_turns: int) -> list[dict[str, Any]]:
    """The messages of a turn; earlier answers are fixed, the same for all servers."""
    url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    shown = {"type": "image_url", "image_url": {"url": url}}
    messages = [_said("user", shown, {"type": "text", "text": QUESTION})]
    for _ in range(num_turns - 1):
        messages.append(_said("assistant", {"type": "text", "text": ANSWER}))
        messages.append(_said("user", {"type": "text", "text": NEXT}))
    return messages


def _said(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


@dataclass(slots=True)
class Findings:
    """Seconds to the first token of each turn, by repeat, and the number of images encoded."""

    seconds: list[list[float]] = field(default_factory=list)
    num_encoded: int | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """A running server, and its name for the model."""

    port: int
    model: str

    def ask(self, messages: Sequence[dict[str, Any]]) -> float:
        """Seconds until a one-token answer is there."""
        body = {"model": self.model, "messages": messages, "max_tokens": 1, "temperature": 0}
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        started_s = time.perf_counter()
        reply = httpx.post(url, json=body, timeout=600)
        seconds = time.perf_counter() - started_s
        if reply.is_error:
            raise SystemExit(f"{url} answered {reply.status_code}: {reply.text[:500]}")
        return seconds

    def num_encoded(self) -> int:
        """Images that our server has encoded so far, as of its last heartbeat."""
        time.sleep(_BEAT_S)
        lines = httpx.get(f"http://127.0.0.1:{self.port}/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("triptych_images_encoded_total{")]
        return int(float(found[0].split()[-1])) if found else 0


def start(stack: ExitStack, folder: Path, args: argparse.Namespace) -> dict[str, Side]:
    """All servers, ready."""
    sides, probes = {}, []
    quoted, shared = shlex.quote(str(folder)), "--device cpu --dtype bfloat16"
    for name, options in CACHES.items():
        port = free_port()
        command = (
            f"triptych serve --model {quoted} {shared} --port {port} --kv-cache-memory-mb 512"
            f" --log-level warning {options}"
        )
        stack.enter_context(server(command, folder.parent / f"{port}.log"))
        probes.append(f"http://127.0.0.1:{port}/readyz")
        sides[name] = Side(port, folder.name)
    if not args.without_transformers:
        port = free_port()
        command = f"transformers serve {quoted} {shared} --port {port}"
        stack.enter_context(server(command, folder.parent / "transformers.log"))
        probes.append(f"http://127.0.0.1:{port}/health")
        sides[THEIRS] = Side(port, str(folder))
    for probe in probes:
        wait_until_ready(probe, timeout_s=600)
    return sides


def measure(sides: dict[str, Side], args: argparse.Namespace) -> dict[str, Findings]:
    """Every turn of every repeat, sent to one server after the other."""
    width, height = args.size
    warm = conversation(photograph(0, width, height), 1)
    for side in sides.values():
        side.ask(warm)
    found = {name: Findings() for name in sides}
    before = {name: sides[name].num_encoded() for name in CACHES}
    for repeat in range(args.repeats):
        image = photograph(1 + repeat, width, height)
        for findings in found.values():
            findings.seconds.append([])
        for num_turns in range(1, args.turns + 1):
            messages = conversation(image, num_turns)
            for name, side in sides.items():
                found[name].seconds[-1].append(side.ask(messages))
    for name, count in before.items():
        found[name].num_encoded = sides[name].num_encoded() - count
    return found


def report(found: dict[str, Findings]) -> Table:
    """A row per server: times, and ratios to both caches, turn by turn."""
    columns = ("first turn, s", "later turns, s", "times as long: median", "lowest", "highest")
    table = Table("", "images encoded", *columns)
    best = _later(found["both caches"])
    for name, findings in found.items():
        later = _later(findings)
        ratios = [a / b for a, b in zip(later, best, strict=True)]
        table.add_row(
            name,
            "every turn" if findings.num_encoded is None else str(findings.num_encoded),
            f"{statistics.median(turns[0] for turns in findings.seconds):.3f}",
            f"{statistics.median(later):.3f}",
            f"{statistics.median(ratios):.1f}",
            f"{min(ratios):.1f}",
            f"{max(ratios):.1f}",
        )
    return table


def _later(findings: Findings) -> list[float]:
    return [seconds for turns in findings.seconds for seconds in turns[1:]]


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--size", type=int, nargs=2, default=(2048, 1536), metavar="PIXELS")
    parser.add_argument("--tiny", action="store_true", help="a toy, to try the script out")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for vision_turns.json")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place) / "model"
        build_model(folder, TINY if args.tiny else SMOLVLM)
        found = measure(start(stack, folder, args), args)
    Console().print(report(found))
    if args.output:
        kept = {name: asdict(findings) for name, findings in found.items()}
        path = args.output / "vision_turns.json"
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
