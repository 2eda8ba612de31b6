"""Translating a caller's constraint into a grammar for the library.

Owns the translation of each form, and refusals before anything is compiled. Malicious texts can
take long, so it runs only in the grammar child process. Knows no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from llguidance import LLMatcher

from triptych.core.errors import InvalidRequest, RequestError, UnsupportedOption
from triptych.core.grammar.constraint import ConstraintKind
from triptych.core.grammar.gbnf import gbnf_to_lark, is_gbnf
from triptych.core.grammar.schemas import plain_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON_OPTIONS: Final[JsonCompileOptions] = {
    # A space, or a new line with its indent.
    "whitespace_pattern": r"\x20|\x0A(\x20{0,24}|\x09{0,8})",
    "lenient": False,
    "coerce_one_of": False,
}
_OWN_OPTIONS: Final = "x-guidance"
_LITERALS: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(?://|#)[^\n]*')
_TOKEN_NAME: Final = re.compile(r"<[^<>\n]*>")
_SCHEMA_PLACE: Final = re.compile(r"%json @([0-9]+)")


def to_grammar(
    kind: ConstraintKind, text: str, around: str = "", schemas: Sequence[str] = ()
) -> str:
    """The grammar for `GrammarCompiler`. Raises `InvalidRequest`, `UnsupportedOption`."""
    if not around:
        return _form(kind, text, schemas)
    form = _form(kind, text)
    is_lark = kind in ("choice", "grammar")
    inner = {"lark_grammar": form} if is_lark else json.loads(form)["grammars"][0]
    outer = {"lark_grammar": _with_schemas(around, schemas)}
    return json.dumps({"grammars": [outer, {**inner, "name": "form"}]})


def _form(kind: ConstraintKind, text: str, schemas: Sequence[str] = ()) -> str:
    if kind == "json_schema":
        return _from_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    return LLMatcher.grammar_from_lark(_with_schemas(_to_lark(text), schemas))


def _with_schemas(lark: str, schemas: Sequence[str]) -> str:
    """Insert the schemas at their placeholders in a grammar in Lark's notation."""
    if not schemas:
        return lark
    written = [json.dumps(tidy_schema(json.loads(schema))) for schema in schemas]
    return _SCHEMA_PLACE.sub(lambda place: f"%json {written[int(place[1])]}", lark)


def tidy_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `schema` for the library, with bounded white space, which small models need."""
    return {**plain_schema(schema), _OWN_OPTIONS: _JSON_OPTIONS}


def _from_schema(text: str) -> str:
    try:
        schema = json.loads(text)
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, dict):
            raise InvalidRequest("A JSON schema must be an object.")
        if _OWN_OPTIONS in schema:
            raise UnsupportedOption(f"{_OWN_OPTIONS} is not offered in a schema: leave it out.")
        return LLMatcher.grammar_from_json_schema(tidy_schema(schema))
    except (RecursionError, json.JSONDecodeError) as error:
        raise InvalidRequest("The JSON schema is not valid JSON, or nested too deeply.") from error
    except RequestError:
        raise
    except ValueError as error:
        raise InvalidRequest(f"The JSON schema cannot be read: {str(error)[:200]}.") from error


def _to_lark(text: str) -> str:
    """Translate GBNF to Lark's notation; refuse special tokens in either."""
    lark = gbnf_to_lark(text) if is_gbnf(text) else text
    if found := _TOKEN_NAME.search(_LITERALS.sub("", lark)):
        raise UnsupportedOption(
            f"Special tokens are not offered in grammars ({found[0][:40]}): write text in quotes."
        )
    return lark
