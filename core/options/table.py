"""Resolves a `Config` from command line, environment and YAML file.

Owns precedence (command line > environment > file > default), validation and error messages.
`core/options/config.py` declares the options; `refused.toml` lists those refused by name.

    add_options(parser, sections=("models", "device"))   # declares the flags
    config = resolve(parser.parse_args())                # or `resolve_with_sources`
    config = make_config({"device": "cpu"})              # from Python
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.core.errors import ConfigError
from triptych.core.options import refused
from triptych.core.options.command import SectionGroup
from triptych.core.options.config import Config
from triptych.core.options.config_file import read_config_file
from triptych.core.options.declaration import DECLARED, ENVIRONMENT_PREFIX, ROLES, Option, Role
from triptych.core.options.service_links import is_service_link
from triptych.core.options.together import check_together
from triptych.core.options.values import MASK, SECRETS, convert_value, format_value
from triptych.core.process.once import once
from triptych.core.process.suggestions import nearest

SECTIONS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Config))
COMMAND_VARIABLES = (f"{ENVIRONMENT_PREFIX}SERVER", f"{ENVIRONMENT_PREFIX}SERVER_KEY")
"""Variables that are no options of a configuration: `core.client.choice` reads them."""
EVERYWHERE = frozenset({"log_level"})
"""Options of every command, whatever its sections."""


@once
def declared() -> Mapping[str, Option]:
    """Return every option by its field name, in order of declaration."""
    sections = typing.get_type_hints(Config)
    return {
        field.name: _read_field(section, cls, field)
        for section, cls in sections.items()
        for field in dataclasses.fields(cls)
    }


def _read_field(section: str, cls: type, field: dataclasses.Field[Any]) -> Option:
    option: Option = field.metadata[DECLARED]
    return dataclasses.replace(
        option,
        name=field.name,
        section=section,
        type=typing.get_type_hints(cls)[field.name],
        roles=option.roles or getattr(cls, "ROLES", ()),
    )


@once
def _by_spelling() -> Mapping[str, Option]:
    return {_field_name(flag): option for option in declared().values() for flag in option.flags}


def option_name(spelling: str) -> str:
    """The name of an option that may be spelled otherwise; `spelling` if there is no such one."""
    name = _field_name(spelling)
    option = _by_spelling().get(name)
    return name if option is None else option.name


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _field_name(spelling: str) -> str:
    return spelling.lstrip("-").replace("-", "_")


# -- the command line --------------------------------------------------------------------------


def add_options(
    parser: argparse.ArgumentParser,
    *,
    sections: Collection[str] = SECTIONS,
    roles: tuple[Role, ...] = ROLES,
    exclude: Collection[str] = (),
) -> None:
    """Declare the flags of `sections` (and `--config-file`) on `parser`, one group each.

    Options that no model of `roles` reads are left out, and those of `exclude`, which the command
    does not need or declares itself. The namespace holds only flags that the user typed, so that
    other sources can set the rest.
    """
    common = parser.add_argument_group("common options")
    groups = {name: _add_section(parser, f"{name} options") for name in sections}
    for option in declared().values():
        if option.name in exclude or not option.is_for(roles):
            continue
        if option.section in groups:
            _add_option(common if option.is_common else groups[option.section], option)
        elif option.name in EVERYWHERE:
            _add_option(common, option)
    common.add_argument("--config-file", "--config", metavar="FILE", help="YAML file with options.")
    _add_fixed_flags(parser)


def _add_section(parser: argparse.ArgumentParser, title: str) -> SectionGroup:
    group = SectionGroup(parser, title)
    parser._action_groups.append(group)
    return group


def add_model_operands(parser: argparse.ArgumentParser) -> None:
    """Declare models as operands, `triptych serve MODEL ...`, for a parser with `add_options`."""
    parser.add_argument(
        _OPERANDS,
        nargs="*",
        default=(),
        metavar="MODEL",
        help="the same as --model MODEL",
    )


_OPERANDS = "model_operands"


_METAVARS: Mapping[Any, str] = {
    int: "N",
    float: "X",
    tuple[int, ...]: "N,N,...",
    tuple[float, ...]: "X,X,...",
}


def _add_option(group: argparse._ArgumentGroup | argparse.ArgumentParser, option: Option) -> None:
    common: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "help": _help(option),
    }
    if option.is_switch:
        group.add_argument(*option.flags, action=argparse.BooleanOptionalAction, **common)
        return
    metavar = "|".join(option.choices) or _METAVARS.get(option.type, "TEXT")
    action = "append" if option.is_repeatable else "store"
    group.add_argument(*option.flags, action=action, metavar=metavar, **common)


class _FixedAction(argparse.Action):
    """Accepts a fixed option with an accepted value. Stores nothing."""

    def __init__(self, *, entry: refused.Fixed, **kwargs: Any) -> None:
        nargs = 0 if entry.is_switch else None
        super().__init__(nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kwargs)
        self.entry = entry

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        self.entry.check(flag, not flag.startswith("--no-") if self.entry.is_switch else values)


def _add_fixed_flags(parser: argparse.ArgumentParser) -> None:
    for entry in refused.FIXED:
        flags = entry.flags
        if entry.is_switch:
            flags += tuple(flag.replace("--", "--no-", 1) for flag in flags)
        parser.add_argument(*flags, action=_FixedAction, dest=argparse.SUPPRESS, entry=entry)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`; raises ConfigError with the alternative or nearest name of an unknown flag."""
    words = [refused.TRANSLATED.get(word, word) for word in argv]
    _check_short_flags(parser, words)
    if any(action.dest == _OPERANDS for action in parser._actions):
        _check_operands(words)
        args, unknown = parser.parse_known_intermixed_args(words)
    else:
        args, unknown = parser.parse_known_args(words)
    for word in unknown:
        if word.startswith("-") and word not in ("-", "--"):
            raise ConfigError(_explain_flag(parser, word.partition("=")[0]))
    if unknown:
        raise ConfigError(f"unexpected argument {unknown[0]!r}; see `{parser.prog} --help`.")
    return args


def _check_short_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuse words that the parser would cut in two: `-hf` to `-h -f`, `-model` to `-m odel`."""
    known = parser._option_string_actions
    for word in words:
        if word == "--":
            return
        if not word.startswith("-") or word.startswith("--") or word in known:
            continue
        is_cut = word[:2] in _short_flags() and not word[2:].isdecimal()
        if word in refused.REFUSED or (word[:2] in known and is_cut):
            raise ConfigError(_explain_flag(parser, word))


@once
def _short_flags() -> frozenset[str]:
    flags = (flag for option in declared().values() for flag in option.flags)
    return frozenset(flag for flag in flags if len(flag) == 2)


def _check_operands(words: Sequence[str]) -> None:
    """Refuse `--api-key KEY KEY`: the second one would be fetched as a model."""
    for position, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        option = _by_spelling().get(_field_name(flag)) if flag.startswith("-") else None
        operand = next(iter(words[position + (1 if equals else 2) :]), "-")
        if option is None or option.name == "model" or operand.startswith("-"):
            continue
        if option.is_repeatable:
            raise ConfigError(
                f"{flag} takes one value: repeat it for each, and write models before all options."
            )
        if option.is_numbers and operand.strip(",").replace(".", "", 1).isdecimal():
            raise ConfigError(f"{flag} takes one value: separate its numbers by commas.")


def _explain_flag(parser: argparse.ArgumentParser, flag: str) -> str:
    reason = refused.reason(flag)
    if reason is not None:
        return f"{flag} is not offered: {reason}"
    positive = flag.replace("--no-", "--", 1)
    owner = next((option for option in declared().values() if positive in option.flags), None)
    if owner is not None and (owner.is_for_server or not owner.roles):
        return f"{flag} is not an option of `{parser.prog}`: it is for `triptych serve`."
    if owner is not None and owner.roles:
        return f"{flag} is not an option of `{parser.prog}`: it is for {owner.readers}."
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    known = [spelling for action in shown for spelling in action.option_strings]
    near = nearest(flag, [*known, *refused.REFUSED], refused.FIXED_BY_FLAG)
    hint = f"did you mean {near}?" if near else f"see `{parser.prog} --help`."
    if near and (reason := refused.reason(near)):
        hint += f" That is not offered: {reason}"
    return f"unknown option {flag}; {hint}"


def _help(option: Option) -> str:
    notes = "; ".join(
        note
        for note in (
            "" if option.default in ("", ()) else f"default {format_value(option.default)}",
            "" if option.devices == "cpu,gpu" else f"{option.devices} only",
            f"for {option.readers}" if option.roles else "",
        )
        if note
    )
    return (option.description + (f" [{notes}]" if notes else "")).replace("%", "%%")


# -- resolving ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration with the source of each value: a flag, a variable, a file or `default`.

    `explicit` names the options given as flags or keywords.
    """

    config: Config
    sources: Mapping[str, str]
    explicit: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: Config) -> Resolved:
        """Wrap a configuration built in Python: it is the source of every non-default value."""
        return cls(
            config,
            {
                name: "default" if value_of(config, option) == option.default else "configuration"
                for name, option in declared().items()
            },
        )


def resolve(
    args: argparse.Namespace | None = None, *, environ: Mapping[str, str] | None = None
) -> Config:
    """Resolve `args`, `environ` (default: this process's) and the YAML file.

    Raises ConfigError for an option that is unknown, malformed, out of range or refused.
    """
    return resolve_with_sources(args, environ=environ).config


def resolve_with_sources(
    args: argparse.Namespace | None = None, *, environ: Mapping[str, str] | None = None
) -> Resolved:
    """Like `resolve`, with the source of each value."""
    typed = vars(args) if args is not None else {}
    environ = dict(os.environ if environ is None else environ)
    path = environ.pop(f"{ENVIRONMENT_PREFIX}CONFIG_FILE", None)
    path = typed.get("config_file") or path
    values: dict[str, Any] = {}
    sources = dict.fromkeys(declared(), "default")
    flags = _from_flags(typed)
    for found in (_from_file(path), _from_environment(environ), flags):
        for name, (value, source) in found.items():
            values[name], sources[name] = value, source
    return Resolved(_assemble(values), sources, frozenset(flags))


def make_config(options: Mapping[str, Any]) -> Config:
    """Resolve options given by name from Python, `make_config({"threads": 2})`."""
    return resolve_keywords(options).config


def resolve_keywords(options: Mapping[str, Any]) -> Resolved:
    """Like `make_config`, with the name under which each value was given."""
    values = {
        option.name: convert_value(option, value, _field_name(name), is_text=False)
        for name, value in options.items()
        for option in [_find(name, name, value)]
        if option is not None
    }
    sources = {name: name if name in values else "default" for name in declared()}
    return Resolved(_assemble(values), sources, frozenset(values))


_Found = dict[str, tuple[Any, str]]
"""Values with their sources, by field name."""


def _from_flags(typed: Mapping[str, Any]) -> _Found:
    if operands := typed.get(_OPERANDS):
        typed = {**typed, "model": [*operands, *typed.get("model", ())]}
    return {
        name: (convert_value(option, typed[name], option.flag, is_text=True), option.flag)
        for name, option in declared().items()
        if name in typed
    }


def _from_environment(environ: Mapping[str, str]) -> _Found:
    found: _Found = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in COMMAND_VARIABLES:
            continue
        if is_service_link(variable, text):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        option = _find(name, variable, text, spell=lambda option: option.variable)
        if option is not None:
            is_list = option.is_repeatable and not text.lstrip().startswith("[")  # that is JSON
            value = [part.strip() for part in text.split(",")] if is_list else text.strip()
            found[option.name] = (convert_value(option, value, variable, is_text=True), variable)
    return found


def _from_file(path: str | None) -> _Found:
    if path is None:
        return {}
    source = f"file {Path(path).name}"
    found: _Found = {}
    for key, value in _flatten(read_config_file(path), source):
        where = f"{source}: {key}"
        option = _find(key, where, value, spell=lambda option: option.name)
        if option is not None:
            if option.name in found:
                raise ConfigError(f"{where} is given twice; keep one.")
            found[option.name] = (convert_value(option, value, where, is_text=False), source)
    return found


def _flatten(content: Mapping[str, Any], source: str) -> Iterable[tuple[str, Any]]:
    """Yield the options of a file, which may group them under section names."""
    for key, value in content.items():
        if value is None and key in SECTIONS:
            continue
        if not isinstance(value, dict):
            yield key, value
        elif key not in SECTIONS:
            raise ConfigError(
                f"{source}: unknown section {key!r}; sections are {', '.join(SECTIONS)}."
            )
        else:
            yield from ((str(name), inner) for name, inner in value.items())


def _find(
    spelling: str, where: str, value: Any, *, spell: Callable[[Option], str] | None = None
) -> Option | None:
    """Return the option of `spelling`; None for an accepted fixed option. Raises ConfigError."""
    name = _field_name(spelling)
    option = _by_spelling().get(name)
    if option is not None and _flag(name) in option.flags:  # letters are for flags alone
        return option
    if refused.is_fixed(_flag(name), value):
        return None
    reason = refused.reason(_flag(name))
    if reason is not None:
        raise ConfigError(f"{where} is not offered: {reason}")
    near = nearest(name, _by_spelling(), map(_field_name, refused.REFUSED))
    hint = spell(_by_spelling()[near]) if near and spell else near
    raise ConfigError(f"{where} is not an option" + (f"; did you mean {hint}?" if hint else "."))


def _assemble(values: Mapping[str, Any]) -> Config:
    parts: dict[str, Any] = {}
    for section, cls in typing.get_type_hints(Config).items():
        names = {field.name for field in dataclasses.fields(cls)}
        parts[section] = cls(**{name: values[name] for name in names & values.keys()})
    config = Config(**parts)
    check_together(config)
    return config


# -- showing -----------------------------------------------------------------------------------


def describe(resolved: Resolved) -> Sequence[tuple[Option, Any, str]]:
    """Return each option with its value (secrets masked) and source, in order of declaration."""
    shown = []
    for name, option in declared().items():
        value = value_of(resolved.config, option)
        shown.append((option, _masked(name, value), resolved.sources[name]))
    return shown


def _masked(name: str, value: Any) -> Any:
    if name not in SECRETS:
        return value
    return tuple(MASK for _ in value) if isinstance(value, tuple) else MASK if value else ""


def value_of(config: Config, option: Option) -> Any:
    """Return the value of `option` in `config`."""
    return getattr(getattr(config, option.section), option.name)
