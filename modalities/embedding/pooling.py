"""The stages after an encoder in a sentence-transformers folder: pooling, projections, length.

Owns reading modules.json and the configurations it names. No torch here: both processes read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.process.typed import decode_json
from triptych.core.weights.layout import read_json, read_json_if_there
from triptych.modalities.embedding.architecture import is_cross_encoder

Pooling = Literal["mean", "mean_sqrt", "mean_weighted", "max", "cls", "last"]

_MODES: Mapping[str, Pooling] = {
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "mean_weighted",
}
_OLDER_MODES: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "mean_weighted",
}
_LIBRARY = "sentence_transformers."
_OF_TOKENS = "A ColBERT model compares texts token by token, which is not served."
MODULES = "modules.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """How the states of a text's tokens become its vector.

    `dense` has the folders of projections after pooling. `max_length` 0: that of the encoder.
    `default_prompt` is the name of the prompt of texts for which none is chosen.
    """

    mode: Pooling = "mean"
    normalizes: bool = True
    dense: tuple[str, ...] = ()
    max_length: int = 0
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], default: Pooling = "mean") -> PoolingSpec:
        """The spec of a folder, or that of a cross-encoder, which scores the pooled state."""
        if is_cross_encoder(config):
            mode: Pooling = "mean" if config.get("classifier_pooling") == "mean" else "cls"
            return cls(mode=mode, normalizes=False)
        return cls.read(folder, default)

    @classmethod
    def read(cls, folder: Path, default: Pooling = "mean") -> PoolingSpec:
        """The folder's spec, or the default if it is not a sentence-transformers folder.

        Raises `WeightsError` for unknown modules.
        """
        if not (folder / MODULES).is_file():
            return cls(mode=default)
        mode, normalizes, dense, is_pooled = default, False, [], False
        for module in _read_modules(folder / MODULES):
            kind, path = module["type"].rpartition(".")[2], module["path"]
            if kind == "Dense" and not (is_pooled and module["type"].startswith(_LIBRARY)):
                raise WeightsError(_OF_TOKENS)
            match kind:
                case "Transformer":
                    continue
                case "Pooling":
                    mode, is_pooled = _read_mode(folder / path / "config.json"), True
                case "Dense":
                    dense.append(path)
                case "Normalize":
                    normalizes = True
                case _:
                    raise WeightsError(f"{MODULES} has an unsupported module {kind[:40]!r}.")
        sizes = read_json_if_there(folder / "sentence_bert_config.json")
        own = read_json_if_there(folder / "config_sentence_transformers.json")
        prompts = own.get("prompts") or {}
        return cls(
            mode=mode,
            normalizes=normalizes,
            dense=tuple(dense),
            max_length=int(sizes.get("max_seq_length") or 0),
            prompts={str(name): str(text) for name, text in prompts.items() if text},
            default_prompt=str(own.get("default_prompt_name") or ""),
        )


def _read_modules(file: Path) -> list[dict[str, str]]:
    try:
        modules = decode_json(file.read_bytes(), list[dict[str, Any]])
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"{MODULES} is damaged.") from error
    for module in modules:
        path = str(module.get("path", ""))
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise WeightsError(f"{MODULES} points outside of its folder.")
        module["path"], module["type"] = path, str(module.get("type", ""))
    return modules


def _read_mode(file: Path) -> Pooling:
    config = read_json(file)
    named = config.get("pooling_mode")
    if named is None:
        modes = [mode for name, mode in _OLDER_MODES.items() if config.get(name)]
    else:
        modes = [_MODES[name] for name in (named,) if isinstance(name, str) and name in _MODES]
    if len(modes) != 1 or config.get("include_prompt") is False:
        raise WeightsError("The folder's pooling is not a single supported mode.")
    return modes[0]
