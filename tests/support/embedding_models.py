"""Tiny random encoders of every family, saved as sentence-transformers folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from triptych.core.weights.resolve import ResolvedModel

WORDS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(60)))
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
_MODERN: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "local_attention": 16,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("cls_token_id", "sep_token_id"), 0),
}
_DISTILLED = {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2}
FAMILIES: dict[str, Any] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "roberta": lambda: transformers.RobertaModel(
        transformers.RobertaConfig(**SIZES, pad_token_id=1, type_vocab_size=1)
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaModel(
        transformers.XLMRobertaConfig(**SIZES, pad_token_id=1, type_vocab_size=1)
    ),
    "distilbert": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(
            vocab_size=len(WORDS), max_position_embeddings=64, activation="relu", **_DISTILLED
        )
    ),
    "modernbert": lambda: transformers.ModernBertModel(transformers.ModernBertConfig(**_MODERN)),
    "modernbert-biased": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(
            **_MODERN, attention_bias=True, mlp_bias=True, norm_bias=True, global_rope_theta=500.0
        )
    ),
    "mpnet": lambda: transformers.MPNetModel(transformers.MPNetConfig(**SIZES, pad_token_id=1)),
}


def build(kind: str) -> Any:
    """A random model of a family, for inference."""
    torch.manual_seed(0)
    return FAMILIES[kind]().eval()


_SCORER: dict[str, Any] = {"num_labels": 1, "id2label": {0: "LABEL_0"}}
CROSS_ENCODERS: dict[str, Any] = {
    "bert": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, **_SCORER)
    ),
    "roberta": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**SIZES, **_SCORER, pad_token_id=1, type_vocab_size=1)
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaForSequenceClassification(
        transformers.XLMRobertaConfig(**SIZES, **_SCORER, pad_token_id=1, type_vocab_size=1)
    ),
    "distilbert": lambda: transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(
            vocab_size=len(WORDS), max_position_embeddings=64, **_DISTILLED, **_SCORER
        )
    ),
    "modernbert": lambda: transformers.ModernBertForSequenceClassification(
        transformers.ModernBertConfig(**_MODERN, **_SCORER, classifier_pooling="cls")
    ),
    "modernbert-mean": lambda: transformers.ModernBertForSequenceClassification(
        transformers.ModernBertConfig(
            **_MODERN, **_SCORER, classifier_pooling="mean", classifier_bias=True
        )
    ),
    "mpnet": lambda: transformers.MPNetForSequenceClassification(
        transformers.MPNetConfig(**SIZES, **_SCORER, pad_token_id=1)
    ),
}


def save_cross_encoder(
    folder: Path, kind: str = "bert", **config: Any
) -> tuple[ResolvedModel, Any]:
    """A random model that scores pairs, with a tokenizer of words, and itself in transformers.

    Its weights are large enough for scores to differ. `config` are further fields of config.json.
    """
    torch.manual_seed(0)
    model = CROSS_ENCODERS[kind]().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if not name.endswith(("LayerNorm.weight", "layer_norm.weight", "norm.weight")):
                value.normal_(std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return ResolvedModel(name="judge", reference="judge", folder=str(folder), digest=kind), model


def save(folder: Path, kind: str = "bert", **pooling: bool) -> ResolvedModel:
    """Save a model with a tokenizer of words; with `pooling`, as sentence-transformers does."""
    build(kind).save_pretrained(folder)
    save_tokenizer(folder)
    if pooling:
        write_modules(folder, ["Transformer", "Pooling", "Normalize"])
        write(folder / "1_Pooling" / "config.json", pooling)
    return ResolvedModel(name="tiny", reference="tiny", folder=str(folder), digest=kind)


def save_decoder(
    folder: Path, *, has_modules: bool, architecture: str = "Qwen3ForCausalLM"
) -> tuple[ResolvedModel, Any]:
    """A tiny decoder, as a chat model or as an embedding model, and its trunk in transformers.

    An embedding model is stored as Qwen3-Embedding is: as a chat model's trunk, without its name,
    or by the name of the trunk, as others are.
    """
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **SIZES, head_dim=8, num_key_value_heads=2, tie_word_embeddings=has_modules
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    if has_modules:
        save_file(model.model.state_dict(), folder / "model.safetensors", {"format": "pt"})
        file = folder / "config.json"
        file.write_text(file.read_text().replace("Qwen3ForCausalLM", architecture))
    save_tokenizer(folder)
    if has_modules:
        write_modules(folder, ["Transformer", "Pooling", "Normalize"])
        write(folder / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True})
    return ResolvedModel(name="tiny", reference="tiny", folder=str(folder), digest="d"), model.model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of words, with a mark before and after a text, and between two."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def write_modules(folder: Path, kinds: list[str]) -> None:
    """A modules.json whose modules are in the folders that sentence-transformers gives them."""
    paths = ["" if kind == "Transformer" else f"{i}_{kind}" for i, kind in enumerate(kinds)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write(folder / "modules.json", modules)


def write(file: Path, content: object) -> None:
    """Write JSON, and the folder it is in."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
