"""LoRA adapters in a batch: their cost next to plain rows, and loads and unloads under traffic.

Needs the folder of a model on our own decoder, in safetensors; adapters are made with random
weights. Two parts:

- Speed. A batch of prompts decodes with and without adapters, in turns: the ratio of the rates.
- Traffic. Adapters are loaded, replaced and unloaded at random while answers run. Every answer has
  to be one of those that its name had, without any mixture of two.

    python samples/benchmarks/lora.py FOLDER
    python samples/benchmarks/lora.py FOLDER --rows 0 --changes 1000
    python samples/benchmarks/lora.py FOLDER --cpu-time

On a shared machine, `--cpu-time` with one thread counts processor seconds, which exclude waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from triptych import ChatPipeline
from triptych.core.errors import RequestError

PROMPT = tuple(range(5, 37))


def save_adapter(folder: Path, config: dict[str, Any], rank: int, seed: int) -> None:
    """Save an adapter of all projections of a Llama-like model, in PEFT's format."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    attention = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys)}
    sizes = {f"self_attn.{name}_proj": size for name, size in attention.items()}
    sizes["self_attn.o_proj"] = (queries, hidden)
    sizes |= {f"mlp.{name}_proj": (hidden, inner) for name in ("gate", "up")}
    sizes["mlp.down_proj"] = (inner, hidden)
    source, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for module, (num_inputs, num_outputs) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for side, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                values = torch.randn(shape, generator=source) / num_inputs**0.5
                tensors[f"{name}.lora_{side}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def rate(
    chat: ChatPipeline, names: Sequence[str], num_tokens: int, clock: Callable[[], float]
) -> float:
    """Tokens per second, by the clock, of a batch of rows with these adapters."""
    options = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}

    async def run() -> None:
        await asyncio.gather(*(chat.acomplete(PROMPT, adapter=name, **options) for name in names))

    begun_s = clock()
    asyncio.run(run())
    return len(names) * num_tokens / (clock() - begun_s)


def compare(chat: ChatPipeline, args: argparse.Namespace) -> None:
    """Print the ratio of a batch with adapters to a plain one, turn by turn."""
    plain = [""] * args.rows
    adapted = [chat.adapters[row % args.adapters] for row in range(args.rows)]
    clock = time.process_time if args.cpu_time else time.perf_counter
    for names in (plain, adapted):
        rate(chat, names, 4, clock)
    ratios = []
    for turn in range(args.turns):
        pair = [plain, adapted] if turn % 2 else [adapted, plain]
        rates = [rate(chat, names, args.tokens, clock) for names in pair]
        with_adapters, without = rates if pair[0] is adapted else rates[::-1]
        ratios.append(with_adapters / without)
        print(f"plain {without:.1f}/s, adapters {with_adapters:.1f}/s: {ratios[-1]:.3f}")
    print(f"median {median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


async def churn(chat: ChatPipeline, places: Sequence[Path], num_changes: int) -> None:
    """Load, replace and unload adapters at random while answers run."""
    source, options = random.Random(1), {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    wanted: dict[Path, tuple[int, ...]] = {}
    for place in places:
        await asyncio.to_thread(chat.load_lora_adapter, "x", place)
        answer: Any = await chat.acomplete(PROMPT, adapter="x", **options)
        wanted[place] = answer.samples[0].token_ids
        await asyncio.to_thread(chat.unload_lora_adapter, "x")
    counts = {"answers": 0, "refused": 0}
    had: dict[str, set[Path]] = {}
    is_over = False

    async def ask() -> None:
        while not is_over:
            name = f"n{source.randrange(6)}"
            try:
                found: Any = await chat.acomplete(PROMPT, adapter=name, **options)
            except RequestError:
                counts["refused"] += 1
                await asyncio.sleep(0.001)
                continue
            counts["answers"] += 1
            assert found.samples[0].token_ids in {wanted[place] for place in had[name]}

    askers = [asyncio.create_task(ask()) for _ in range(6)]
    for _ in range(num_changes):
        name, place = f"n{source.randrange(6)}", source.choice(places)
        if name in chat.adapters and source.random() < 0.5:
            await asyncio.to_thread(chat.unload_lora_adapter, name)
        else:
            had.setdefault(name, set()).add(place)
            await asyncio.to_thread(chat.load_lora_adapter, name, place, replace=True)
    is_over = True
    await asyncio.gather(*askers)
    for name in chat.adapters:
        await asyncio.to_thread(chat.unload_lora_adapter, name)
    print(f"{num_changes} changes, {counts['answers']} answers, {counts['refused']} refused")


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch; 0: no speed")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a row")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="one thread's processor seconds")
    parser.add_argument("--changes", type=int, default=0, help="loads and unloads under traffic")
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    with tempfile.TemporaryDirectory() as temporary:
        places = [Path(temporary, f"a{number}") for number in range(args.adapters)]
        for number, place in enumerate(places):
            save_adapter(place, config, args.rank, number)
        options = {"max_length": 512, "max_num_loras": args.adapters, "threads": int(args.cpu_time)}
        with ChatPipeline.from_pretrained(str(args.model), progress=False, **options) as chat:
            if args.rows:
                for place in places:
                    chat.load_lora_adapter(place.name, place)
                compare(chat, args)
                for place in places:
                    chat.unload_lora_adapter(place.name)
            if args.changes:
                asyncio.run(churn(chat, places, args.changes))


if __name__ == "__main__":
    main()
