"""Whether an option that was given has a reader.

Owns the report of one that no model at hand reads. Typed for this run, as a flag or a keyword, it
is a mistake and an error. A file, the environment and a ready `Config` may be shared by servers of
other models: there it is a warning. Knows which models read an option from its declaration alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from itertools import groupby

from triptych.core.errors import ConfigError
from triptych.core.options.declaration import Option, Role
from triptych.core.options.table import Resolved, declared

_log = logging.getLogger(__name__)


def check_relevance(resolved: Resolved, roles: Collection[Role]) -> None:
    """Raise `ConfigError` for typed options that no model of `roles` reads; warn of shared ones."""
    idle = [
        option
        for name, option in declared().items()
        if resolved.sources[name] != "default" and not option.is_for(roles)
    ]
    typed = [option for option in idle if option.name in resolved.typed]
    if typed:
        raise ConfigError(
            f"{_say(typed, resolved)}. No such model runs here: leave it out, or name one with"
            " --model."
        )
    if idle:
        _log.warning("without effect here: %s", _say(idle, resolved))


def check_in_process(resolved: Resolved) -> None:
    """Raise `ConfigError` for keywords and flags about a server, where none is started."""
    names = [
        _spell(option, resolved.sources[option.name])
        for option in declared().values()
        if option.is_for_server and option.name in resolved.typed
    ]
    if names:
        raise ConfigError(
            f"{', '.join(names)} {'are' if names[1:] else 'is'} for `triptych serve`: a model in"
            " this process takes calls, no requests. Leave it out."
        )


def _say(options: Iterable[Option], resolved: Resolved) -> str:
    """The options as they were given, each group with the models it is for."""
    groups = []
    for readers, group in groupby(options, key=lambda option: option.readers):
        names = [_spell(option, resolved.sources[option.name]) for option in group]
        groups.append(f"{', '.join(names)} {'are' if names[1:] else 'is'} for {readers}")
    return "; ".join(groups)


def _spell(option: Option, source: str) -> str:
    is_name = source in (option.name, option.flag, option.variable)
    return source if is_name else f"{option.name} ({source})"
