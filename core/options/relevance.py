"""Reports options that no loaded model reads.

As a flag or a keyword, such an option is an error. In a file, the environment or a ready `Config`,
which servers of other models may share, it is a warning. Knows which models read an option only
from its declaration.
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
    """Raise `ConfigError` for flags that no model of `roles` reads; log shared options."""
    idle = [
        option
        for name, option in declared().items()
        if resolved.sources[name] != "default" and not option.is_for(roles)
    ]
    typed = [option for option in idle if option.name in resolved.explicit]
    if typed:
        raise ConfigError(
            f"{_describe(typed, resolved)}. No such model runs here: leave it out, or name one with"
            " --model."
        )
    if idle:
        _log.warning("without effect here: %s", _describe(idle, resolved))


def check_in_process(resolved: Resolved) -> None:
    """Raise `ConfigError` for keywords and flags of the server if none is started."""
    names = [
        spelled(option, resolved.sources[option.name])
        for option in declared().values()
        if option.is_for_server and option.name in resolved.explicit
    ]
    if names:
        raise ConfigError(
            f"{', '.join(names)} {'are' if names[1:] else 'is'} for `triptych serve`: a model"
            " in this process gets no HTTP requests. Leave it out."
        )


def _describe(options: Iterable[Option], resolved: Resolved) -> str:
    """Return the options as they were given, grouped by the models they are for."""
    groups = []
    for readers, group in groupby(options, key=lambda option: option.readers):
        names = [spelled(option, resolved.sources[option.name]) for option in group]
        groups.append(f"{', '.join(names)} {'are' if names[1:] else 'is'} for {readers}")
    return "; ".join(groups)


def spelled(option: Option, source: str) -> str:
    """Return an option as it was given: its flag, its variable, or its name in a file."""
    is_name = source in (option.name, option.flag, option.variable)
    return source if is_name else f"{option.name} ({source})"
