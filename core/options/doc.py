"""`docs/options.md`, made from the declared options and the table of refused ones.

python -m triptych.core.options.doc > docs/options.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import groupby
from typing import get_type_hints

from triptych.core.options import refused
from triptych.core.options.config import Config
from triptych.core.options.declaration import ENVIRONMENT_PREFIX, Option
from triptych.core.options.table import declared, format_value

_HEAD = f"""\
# Options

<!-- Made by `python -m triptych.core.options.doc > docs/options.md`; do not edit. -->

Every option can be given on the command line, as an environment variable (`{ENVIRONMENT_PREFIX}`
and the name in capitals; lists separated by commas) or in a YAML file named by `--config-file` or
`{ENVIRONMENT_PREFIX}CONFIG_FILE`, where options stand at the top level or under the names of the
sections below. The command line wins over the environment, the environment over the file.
`triptych config` prints what came of it and where each value came from. In Python they are keyword
arguments: `ChatPipeline.from_pretrained(model, max_batch_size=8)`.

An option that is not known, a value out of range and a variable beginning with
`{ENVIRONMENT_PREFIX}` that is no option are errors. (Kubernetes sets such variables for a service
named `triptych`: name it otherwise, or set `enableServiceLinks: false`.)

Where kinds of models stand under "for", no other model reads the option. Given as a flag or as a
keyword to Python where no such model runs, it is an error; in a file or the environment, which
servers of several models may share, it is a warning in the log. (With no `--model` there is one of
each kind. A chat model embeds, too.)
"""

_PEERS = """\
## Options of other servers

No option of MAX or SGLang is accepted and then ignored. Flags that mean the same as one of ours
stand beside it above. The others are either accepted where they name what happens anyway, or
refused with the words below.
"""


def render() -> str:
    """The whole page."""
    titles = {name: cls.__doc__ or "" for name, cls in get_type_hints(Config).items()}
    parts = [_HEAD]
    for section, options in groupby(declared().values(), key=lambda option: option.section):
        parts.append(f"## {section}\n\n{titles[section]}\n")
        parts.append(_table(("option", "default", "on", "for", "meaning"), map(_row, options)))
    return "\n".join([*parts, _peers()])


def _row(option: Option) -> tuple[str, ...]:
    spellings = [option.flag, *option.aliases]
    if option.is_switch:
        spellings.insert(1, option.flag.replace("--", "--no-", 1))
    notes = [option.description]
    if option.choices:
        notes.append(f"One of {', '.join(option.choices)}.")
    if option.within is not None:
        notes.append(f"Must be {option.within}.")
    default = format_value(option.default)
    shown = f"`{default}`" if default else ""
    return _code(spellings), shown, option.devices, ", ".join(option.roles), " ".join(notes)


def _peers() -> str:
    translated = ((f"`{flag}`", f"`{ours}`") for flag, ours in refused.TRANSLATED.items())
    fixed = ((_code(entry.flags), _accepted(entry), entry.reason) for entry in refused.FIXED)
    by_reason: dict[str, list[str]] = {}
    for flag, reason in refused.REFUSED.items():
        by_reason.setdefault(reason, []).append(flag)
    rejected = ((reason, _code(flags)) for reason, flags in by_reason.items())
    return "\n".join(
        (
            _PEERS,
            "### In our words\n",
            _table(("flag", "the same as"), translated),
            "### Accepted where they change nothing\n",
            _table(("flag", "accepted", "because"), fixed),
            "### Refused\n",
            _table(("what to do", "flags"), rejected),
        )
    )


def _accepted(entry: refused.Fixed) -> str:
    if entry.is_switch:
        return "given" if entry.accepts == ("true",) else "`--no-` form"
    return _code(entry.accepts)


def _code(words: Iterable[str]) -> str:
    return " ".join(f"`{word}`" for word in words)


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (titles, ("---",) * len(titles), *rows)
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


if __name__ == "__main__":
    sys.stdout.write(render())
