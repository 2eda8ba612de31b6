"""The adapters of `--lora-paths` in a server whose models come and go.

Owns which model each is for: that of the first start, in every later start of a process as well.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from triptych.core.options.adapters import AdapterPlace
from triptych.core.options.config import Config
from triptych.core.options.served_names import ServedNames
from triptych.core.process.logs import fields
from triptych.core.weights.peft import is_of_text, locate_adapter

_log = logging.getLogger("triptych.adapters")


def with_base_model(config: Config, texts: Sequence[str]) -> Config:
    """Return `config` with the only text model as the base of each adapter that names none.

    `texts` are the text models of the start. Image models do not read the base.
    """
    if len(texts) != 1:
        return config
    places = config.adapters.places()
    return _with(
        config,
        [AdapterPlace(each.name, each.path, each.base_model_name or texts[0]) for each in places],
    )


def without_gone(config: Config, *, removed: Collection[str], added: Collection[str]) -> Config:
    """Return `config` without the text adapters of models that were `removed` at run time.

    Those whose name a model took that was `added` are left out, too: both had been unloaded.
    """
    if not (removed or added):
        return config
    aliases, kept = ServedNames.read(config.models).aliases, list[AdapterPlace]()
    for each in config.adapters.places():
        base = aliases.get(each.base_model_name, each.base_model_name)
        is_gone = base in removed or each.name in added
        if is_gone and is_of_text(locate_adapter(each.path, config.models)):
            _log.warning("an adapter is left out", extra=fields(adapter=each.name, model=base))
        else:
            kept.append(each)
    return _with(config, kept)


def _with(config: Config, places: Sequence[AdapterPlace]) -> Config:
    if config.adapters.enable_lora is False:  # then there are no places, whatever is given
        return config
    paths = tuple(map(AdapterPlace.as_option, places))
    return replace(config, adapters=replace(config.adapters, lora_paths=paths))
