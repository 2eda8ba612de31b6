"""Options of LoRA adapters, for text and image models.

Owns the declarations, and the form of `--lora-paths`. Opens no file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from triptych.core.errors import ConfigError
from triptych.core.options.declaration import BOUND, COUNT, Role, option
from triptych.core.process.typed import convert, decode_json

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][\w.:@-]*)=(?P<place>.+)")


class AdapterPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter of `--lora-paths`: a file, folder or hub id, and the model that it changes.

    Without a `base_model_name` it is for the only model of its kind.
    """

    name: str
    path: str
    base_model_name: str = ""

    def as_option(self) -> str:
        """The value of `--lora-paths` that gives this adapter."""
        return msgspec.json.encode(self).decode()


class _SglangPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SGLang's form of an adapter. All adapters may give way to others, so none is pinned."""

    lora_name: str
    lora_path: str
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """LoRA adapters that requests may use."""

    ROLES: ClassVar[tuple[Role, ...]] = ("chat", "vision", "image")

    enable_lora: bool | None = option(
        None,
        "Accept requests for adapters; off: no adapter is loaded and all such requests are refused."
        " Text models on a GPU keep room for adapters with --lora-paths, or if this is on.",
    )
    lora_paths: tuple[str, ...] = option(
        (),
        "A LoRA adapter that requests may use: a safetensors file, folder or hub id; repeat for"
        " several. `name=reference` sets its name; with several chat models write"
        ' {"name": NAME, "path": REFERENCE, "base_model_name": MODEL}.',
        aliases=("--lora-modules",),
    )
    max_lora_rank: int = option(
        0,
        "Highest accepted rank of an adapter; 0: for image models any, for text models 4096 on a"
        " CPU. On a GPU, and with --cpu-kernels torch, text models take memory for a rank at start:"
        " with 0 for the highest of --lora-paths, or for 16 without any; on a GPU 128 at most.",
        within=BOUND,
    )
    max_num_loras: int = option(
        8,
        "Maximum number of different adapters in memory for one text model, or in one run of an"
        " image model; requests with further adapters wait, and requests without adapters do not"
        " count.",
        aliases=("--max-loras-per-batch", "--max-loras"),
        within=COUNT,
    )
    max_loaded_loras: int = option(
        0,
        "Maximum number of adapters that a text model offers, those loaded at run time included;"
        " 0: any. At least --max-num-loras.",
        within=BOUND,
        roles=("chat", "vision"),
    )
    lora_target_modules: tuple[str, ...] = option(
        (),
        "Module of a text model that adapters may change, such as q_proj; repeat for several."
        " Default, and `all`: every module that this server can change.",
        roles=("chat", "vision"),
    )
    lora_eviction_policy: str = option(
        "lru",
        "Which adapter without requests makes room for another: the one unused for longest, or the"
        " one loaded first.",
        choices=("lru", "fifo"),
        roles=("chat", "vision"),
    )

    def places(self) -> list[AdapterPlace]:
        """The adapters of `--lora-paths`; none where they are off.

        Without `name=` an adapter is named after its file. Raises `ConfigError` for a name that
        occurs twice, and for a form that is not understood.
        """
        found: dict[str, AdapterPlace] = {}
        for given in self.lora_paths if self.enable_lora is not False else ():
            place = _place_of(given)
            if place.name in found:
                raise ConfigError(
                    f"Two adapters are called {place.name!r}; write --lora-paths NAME=PLACE."
                )
            found[place.name] = place
        return list(found.values())


def _place_of(given: str) -> AdapterPlace:
    if given.lstrip().startswith("{"):
        return _decoded(given)
    match = _NAMED.fullmatch(given)
    name, place = (match["name"], match["place"]) if match else (Path(given).stem, given)
    return AdapterPlace(name, place)


def _decoded(given: str) -> AdapterPlace:
    try:
        found = decode_json(given, dict)
        if "lora_name" not in found:
            return convert(found, AdapterPlace)
        place = convert(found, _SglangPlace)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"--lora-paths: {given!r:.200} is not an adapter: {error}.") from error
    if place.pinned:
        raise ConfigError(
            "--lora-paths: pinned has no effect here; raise --max-num-loras, so that all fit."
        )
    return AdapterPlace(place.lora_name, place.lora_path)
