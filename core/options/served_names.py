"""The names under which models are served: a name for each model, and aliases.

Owns the syntax of `--served-model-name`. Does not know how requests use the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.core.errors import ConfigError
from triptych.core.options.config import ModelOptions


@dataclass(frozen=True, slots=True)
class ServedNames:
    """`own`: the given names, in the order of the models; `aliases`: further names."""

    own: tuple[str, ...]
    aliases: Mapping[str, str]

    @classmethod
    def read(cls, options: ModelOptions) -> ServedNames:
        """Parse the option. With one model, all names after the first are aliases.

        Raises `ConfigError`.
        """
        entries = [entry.partition("=") for entry in options.served_model_name]
        given = [name for name, _, _ in entries]
        for name, equals, of in entries:
            if not name or (equals and not of):
                raise ConfigError(f"--served-model-name {name}{equals}{of}: empty name.")
            if given.count(name) > 1:
                raise ConfigError(f"--served-model-name: {name!r} is given twice.")
        plain = [name for name, equals, _ in entries if not equals]
        num_models = max(len(options.model), 1)
        if num_models == 1:
            aliases = dict.fromkeys(plain[1:], plain[0]) if plain else {}
        elif len(plain) > num_models:
            raise ConfigError(
                "more --served-model-name than --model; write ALIAS=NAME for a further name of a"
                " model."
            )
        else:
            aliases = {}
        aliases |= {alias: name for alias, equals, name in entries if equals}
        return cls(tuple(plain[:num_models]), aliases)

    def check(self, names: Sequence[str]) -> None:
        """Raise `ConfigError` for an alias of an unknown model or with a model's name."""
        for alias, name in self.aliases.items():
            if name not in names:
                raise ConfigError(
                    f"--served-model-name {alias}={name}: there is no model of that name."
                )
            if alias in names:
                raise ConfigError(f"--served-model-name: {alias!r} is already the name of a model.")
