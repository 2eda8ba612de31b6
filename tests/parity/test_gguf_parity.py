"""The embedded model's GGUF file, for real: its tensors as the `gguf` library reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize

from triptych.core.options.config import ModelOptions
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.packages import EMBEDDED, fetch_file
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import resolve

NUM_HEADS, NUM_KV_HEADS = 9, 3
SOME_LAYERS = ([], ["0"], ["13"], ["29"])  # the library takes long; [] is outside of layers
MAX_ROWS = 2048
"""Of a tensor: all but the embeddings have fewer."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
INTERLEAVED = {
    "blk.{}.attn_q": ("model.layers.{}.self_attn.q_proj", NUM_HEADS),
    "blk.{}.attn_k": ("model.layers.{}.self_attn.k_proj", NUM_KV_HEADS),
}
"""Projections whose pairs of rotated rows a GGUF file has beside each other, by their heads."""


def halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The first halves of all pairs of a head, then the second."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.embedded
@pytest.mark.timeout(600)  # fetches 98 MB
def test_tensors_equal_the_librarys(tmp_path: Path) -> None:
    source = fetch_file(EMBEDDED, tmp_path / "package", SilentProgress())
    options = ModelOptions(cache_dir=str(tmp_path / "cache"))
    folder = resolve(str(source), name=None, options=options, progress=SilentProgress()).folder
    tensors = {each.name.removesuffix(".weight"): each for each in GGUFReader(source).tensors}
    names = {"token_embd": NAMES["token_embd"], "output_norm": NAMES["output_norm"]}
    heads: dict[str, int] = {}
    for layer in range(30):
        names |= {a.format(layer): b.format(layer) for a, b in NAMES.items() if "{}" in a}
        names |= {a.format(layer): b.format(layer) for a, (b, _) in INTERLEAVED.items()}
        heads |= {a.format(layer): num for a, (_, num) in INTERLEAVED.items()}
    assert tensors.keys() == names.keys()
    with Checkpoint.open(folder) as checkpoint:
        assert len(checkpoint.tensors) == len(names)
        for name in [name for name in names if name.split(".")[1:2] in SOME_LAYERS]:
            values = dequantize(tensors[name].data[:MAX_ROWS], tensors[name].tensor_type)
            wanted = halves(values, heads[name]) if name in heads else values
            ours = checkpoint.read(f"{names[name]}.weight")[:MAX_ROWS]
            assert torch.equal(ours, torch.from_numpy(wanted.copy()).to(torch.bfloat16)), name
