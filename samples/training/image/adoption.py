"""Taking over an exported model: its codec, text encoders and transformer as a start.

Owns where the parts go. New words are placed among the old ones by the linear map from MiniLM's
embeddings to each text encoder's, so that they are near those of similar meaning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from codec import new_codec
from model import Model, ModelSize
from safetensors.torch import load_file
from text import MAX_TOKENS, choose_tokens, pieces_of
from torch import Tensor
from transformers import AutoTokenizer, BertModel


def adopt_codec(folder: Path, exported: Path) -> None:
    """Write an exported folder's codec as if trained in `folder`.

    A decoder of another size begins anew.
    """
    given = load_file(exported / "vae" / "diffusion_pytorch_model.safetensors")
    own = new_codec().state_dict()
    shapes = {name: tensor.shape for name, tensor in own.items()}
    if {name: tensor.shape for name, tensor in given.items()} != shapes:
        given = {name: tensor for name, tensor in given.items() if name.startswith("encoder.")}
        print("The decoder has another size, and begins anew: run `codec --encoder-minutes 0`.")
    folder.mkdir(parents=True, exist_ok=True)
    state = {**own, **{name: tensor.float() for name, tensor in given.items()}}
    torch.save({"codec": state}, folder / "codec.pt")


def adopt_scale(folder: Path, exported: Path) -> None:
    """Write the scale of an exported folder's latents as if measured in `folder`."""
    config = json.loads((exported / "vae" / "config.json").read_text(encoding="utf-8"))
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    scale = {"mean": config["shift_factor"], "deviation": 1 / config["scaling_factor"]}
    (folder / "corpus" / "scale.json").write_text(json.dumps(scale), encoding="utf-8")


def adopt(
    exported: Path, minilm: Path, captions: Iterable[str], size: ModelSize
) -> tuple[list[str], Model]:
    """Word pieces and a model that begins as an exported one does.

    More single blocks than that has begin without effect. If its width is another, only the text
    encoders are taken over.
    """
    tokenizer = AutoTokenizer.from_pretrained(exported / "tokenizer")
    tokens, embeddings = choose_tokens(minilm, captions, pieces_of(tokenizer.get_vocab()))
    model = Model(embeddings, size)
    for part, reader in (
        ("text_encoder", model.readers.whole),
        ("text_encoder_2", model.readers.words),
    ):
        _adopt_reader(reader, load_file(exported / part / "model.safetensors"), embeddings)
    given = load_file(exported / "transformer" / "diffusion_pytorch_model.safetensors")
    own = model.transformer.state_dict()
    if own["x_embedder.weight"].shape == given["x_embedder.weight"].shape:
        if strange := given.keys() - own.keys():
            raise SystemExit(f"{exported} has more blocks ({min(strange)}): raise --single-blocks.")
        model.transformer.load_state_dict({**own, **{name: given[name].float() for name in given}})
    return tokens, model


def _adopt_reader(reader: BertModel, given: dict[str, Tensor], embeddings: Tensor) -> None:
    """Take over a text encoder, and place new words among its old ones."""
    old = given.pop("embeddings.word_embeddings.weight").float()
    places = "embeddings.position_embeddings.weight"
    given[places] = given[places][:MAX_TOKENS]
    own = reader.state_dict()
    reader.load_state_dict({**own, **{name: given[name].float() for name in given if name in own}})
    inputs = torch.cat((embeddings, torch.ones(len(embeddings), 1)), 1)
    way = torch.linalg.lstsq(inputs[: len(old)], old).solution
    with torch.no_grad():
        reader.embeddings.word_embeddings.weight.copy_(
            torch.cat((old, inputs[len(old) :] @ way)) if len(inputs) > len(old) else old
        )
