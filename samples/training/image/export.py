"""Export: checkpoints to a folder in the hub's layout, which diffusers' FluxPipeline opens.

Owns the folder's files, and the linear map from latents to previews.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from codec import LATENT_CHANNELS, open_codec
from composites import pixels_of, sample_trained
from corpus import Corpus
from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, FluxPipeline
from model import Model, ModelSize
from pictures.compositions import PICTURE_SIZE, Catalogue
from pictures.drawings import Drawings
from safetensors.torch import save_file
from text import EMBEDDING_SIZE, new_tokenizer, pieces_of
from torch import Tensor
from torch.nn import functional
from transformers import BertModel

_LONGEST = 512
_DOWNSCALE = 8
_NUM_PREVIEWED = 512
DEFAULT_STEPS, DEFAULT_GUIDANCE = 20, 3.0
_OWN = {
    "default_size": PICTURE_SIZE,
    "default_steps": DEFAULT_STEPS,
    "default_guidance": DEFAULT_GUIDANCE,
}


def export(folder: Path, out: Path, catalogue: Catalogue, drawings: Drawings) -> None:
    """Write the pipeline in bfloat16, and `preview.safetensors` beside its model_index.json."""
    state = torch.load(folder / "model.pt", weights_only=True, map_location="cpu")
    tokens = pieces_of(state["tokens"])
    model = Model(torch.randn(len(tokens), EMBEDDING_SIZE), ModelSize(*state["size"]))
    model.load_state_dict(state["mean"])
    codec = open_codec(folder)
    mean, deviation = Corpus(folder).scale
    codec.register_to_config(
        scaling_factor=1 / deviation,
        shift_factor=mean,
        block_out_channels=codec.config["decoder_block_out_channels"],
    )
    for reader in (model.readers.whole, model.readers.words):
        lengthen(reader, _LONGEST)
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=codec,
        text_encoder=model.readers.whole,
        tokenizer=new_tokenizer(tokens),
        text_encoder_2=model.readers.words,
        tokenizer_2=new_tokenizer(tokens),
        transformer=model.transformer,
    )
    pipeline.to(torch.bfloat16).save_pretrained(out)
    for file in out.rglob("*.safetensors"):
        file.chmod(0o644)
    index = out / "model_index.json"
    facts = {**json.loads(index.read_text(encoding="utf-8")), **_OWN}
    index.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    save_file(
        preview_map(codec, (mean, deviation), catalogue, drawings), out / "preview.safetensors"
    )


def lengthen(reader: BertModel, length: int) -> None:
    """Extend a text encoder's positions: all after the last trained one are copies of it.

    FluxPipeline pads prompts to 512 tokens by default.
    """
    old = reader.embeddings.position_embeddings
    new = torch.nn.Embedding(length, old.embedding_dim)
    with torch.no_grad():
        new.weight.copy_(old.weight[torch.arange(length).clamp(max=len(old.weight) - 1)])
    reader.embeddings.position_embeddings = new
    reader.embeddings.register_buffer("position_ids", torch.arange(length)[None], persistent=False)
    reader.embeddings.register_buffer(
        "token_type_ids", torch.zeros(1, length, dtype=torch.long), persistent=False
    )
    reader.config.max_position_embeddings = length


@torch.inference_mode()
def preview_map(
    codec: AutoencoderDC, scale: tuple[float, float], catalogue: Catalogue, drawings: Drawings
) -> dict[str, Tensor]:
    """`weight` `[3, C]` and `bias` `[3]`: latents as the model has them to RGB in 0..1.

    By least squares over images downscaled by eight.
    """
    rng = np.random.default_rng(0)
    rows = [sample_trained(catalogue, drawings, rng) for _ in range(_NUM_PREVIEWED)]
    drawn = pixels_of(rows, catalogue, drawings, rng)
    pixels = functional.avg_pool2d(drawn, _DOWNSCALE) / 2 + 0.5
    latents = torch.cat([codec.encode(part.to(codec.dtype)).latent for part in drawn.split(32)])
    clean = (latents.float() - scale[0]) / scale[1]
    inputs = clean.permute(0, 2, 3, 1).reshape(-1, LATENT_CHANNELS)
    inputs = torch.cat((inputs, torch.ones(len(inputs), 1)), 1)
    found = torch.linalg.lstsq(inputs, pixels.permute(0, 2, 3, 1).reshape(-1, 3)).solution
    return {"weight": found[:-1].T.contiguous(), "bias": found[-1].contiguous()}
