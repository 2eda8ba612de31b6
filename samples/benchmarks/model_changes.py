"""Load, unload, delete and add models at random while requests run, and look for leaks.

Starts a server with four tiny models of random weights. `--changes` changes are made by one task
while others ask the models without a pause. Every request must end with an answer or with a typed
error; afterwards device memory, descriptors and threads must be as they were before.

    python samples/benchmarks/model_changes.py --changes 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from pathlib import Path

import httpx
import psutil
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from triptych import Server

NAMES = ("alpha", "beta", "gamma", "delta")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
TYPED = {"model_not_found", "not_found", "asleep", "overloaded", "engine_down", "unavailable"}
NUM_READERS = 4


def write_model(folder: Path, seed: int) -> None:
    """Write a tiny llama with a byte tokenizer."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={each: n for n, each in enumerate((*SPECIALS, *alphabet))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class Driver:
    """Changes the models of a server and asks them."""

    def __init__(self, client: httpx.AsyncClient, root: Path, seed: int) -> None:
        self.client = client
        self.root = root
        self.random = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.is_over = False

    async def change(self) -> None:
        """Make one change."""
        name = self.random.choice(NAMES)
        kind = self.random.choices(("load", "unload", "delete", "pull"), (4, 4, 1, 2))[0]
        if kind == "delete":
            reply = await self.client.delete(f"/v1/models/{name}")
        elif kind == "pull":
            body = {"model": str(self.root / name), "stream": False}
            reply = await self.client.post("/v1/engine/pull", json=body)
        else:
            reply = await self.client.post(f"/v1/engine/{kind}", json={"model": name})
        self.note(kind, reply.status_code, reply.content)

    async def read(self) -> None:
        """Ask models for streams, one after another; leave every fourth early."""
        while not self.is_over:
            body = {
                "model": self.random.choice(NAMES),
                "messages": [{"role": "user", "content": "hi" * self.random.randint(1, 40)}],
                "max_tokens": self.random.randint(1, 60),
                "stream": True,
            }
            path = "/v1/chat/completions"
            async with self.client.stream("POST", path, json=body) as reply:
                if self.random.random() < 0.25 and reply.is_success:
                    self.ends["chat left"] += 1
                    continue
                self.note("chat", reply.status_code, await reply.aread())

    def note(self, kind: str, status: int, content: bytes) -> None:
        """Count an end. Raises `AssertionError` for one that is not typed."""
        if status == 200:
            last = content.strip().rpartition(b"\n")[2]
            is_whole = kind != "chat" or last == b"data: [DONE]"
            code = "ok" if is_whole else json.loads(last.removeprefix(b"data: "))["error"]["code"]
        else:
            code = json.loads(content)["error"]["code"]
        assert code in TYPED | {"ok"}, (kind, status, content)
        self.ends[f"{kind} {code}"] += 1

    async def unload_all(self) -> None:
        """Serve all models, and none of them in memory."""
        for name in NAMES:
            body = {"model": str(self.root / name), "stream": False}
            (await self.client.post("/v1/engine/pull", json=body)).raise_for_status()
            await self.client.post("/v1/engine/load", json={"model": name})
            await self.client.post("/v1/engine/unload", json={"model": name})
        for _ in range(600):
            if all(each["state"] == "unloaded" for each in await self.states()):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(await self.states())

    async def states(self) -> list[dict[str, object]]:
        """The models of the engine."""
        found: list[dict[str, object]] = (await self.client.get("/v1/engine/models")).json()[
            "models"
        ]
        return found

    async def device_bytes(self) -> int:
        """The bytes that the ledger has given away."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        held = (line for line in lines if line.startswith("triptych_device_memory_bytes{"))
        return sum(int(float(line.rpartition(" ")[2])) for line in held)


def usage(pid: int) -> dict[str, list[int]]:
    """Descriptors and threads of each process of the server, by its program."""
    found = {}
    root = psutil.Process(pid)
    for process in (root, *root.children()):
        name = " ".join(process.cmdline()[-2:])
        found[name] = [process.num_fds(), process.num_threads(), process.memory_info().rss >> 20]
    return found


async def run(server: Server, root: Path, num_changes: int, seed: int) -> None:
    """Warm up, measure, change, and measure again."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        driver = Driver(client, root, seed)
        await driver.unload_all()
        for each in range(2):
            readers = [asyncio.create_task(driver.read()) for _ in range(NUM_READERS)]
            for _ in range(num_changes if each else num_changes // 4):  # first to warm up
                await driver.change()
                await asyncio.sleep(driver.random.random() * 0.05)
            driver.is_over = True
            await asyncio.gather(*readers)
            driver.is_over = False
            await driver.unload_all()
            await asyncio.sleep(2)
            print("device bytes", await driver.device_bytes(), usage(server.pid))
        print(dict(sorted(driver.ends.items())))


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for seed, name in enumerate(NAMES):
            write_model(root / name, seed)
        options = {"pull_folder": [folder], "device": "cpu", "cache_dir": str(root / "cache")}
        with Server(str(root / NAMES[0]), load="first-use", **options) as server:
            try:
                asyncio.run(run(server, root, args.changes, args.seed))
            except BaseException:
                print(server.log.read_text()[-6000:])
                raise


if __name__ == "__main__":
    main()
