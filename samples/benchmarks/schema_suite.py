"""The JSON Schema test suite against our grammars: no model, no server.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite suite
    python samples/benchmarks/schema_suite.py suite/tests/draft2020-12

The grammar of each accepted schema must reject invalid instances; a valid instance that it rejects
is listed as narrower (another spelling of a number, properties that the schema does not name).
Prints wrong, narrower and refused ones; the exit code is 1 if any was wrong. Formats that
are annotations to us count as wrong where the suite asserts them (`optional/format`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from triptych.core.errors import RequestError
from triptych.core.grammar.compiler import GrammarCompiler
from triptych.core.grammar.source import to_grammar
from triptych.core.grammar.vocabulary import GrammarVocabulary

MAX_SPELLINGS = 96
"""Maximum number of orders of properties to try: grammars have the order of the schema."""


class Checker:
    """Judges instances by grammars over single bytes."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: n for n, token in enumerate(alphabet)}
        self._tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._compiler = GrammarCompiler(GrammarVocabulary(self._tokenizer, len(vocab)))

    def takes(self, schema: Any, instance: Any) -> bool:
        """Whether a grammar takes an instance in any order of its properties."""
        grammar = to_grammar("json_schema", json.dumps(schema))
        spellings = (json.dumps(each, ensure_ascii=False) for each in orders(instance))
        return any(self._takes(grammar, text) for text in islice(spellings, MAX_SPELLINGS))

    def _takes(self, grammar: str, text: str) -> bool:
        matcher = self._compiler.compile(grammar)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def orders(value: Any) -> Iterator[Any]:
    """`value` with the properties of its objects in every order."""
    if isinstance(value, dict):
        for parts in product(*(list(orders(part)) for part in value.values())):
            for items in permutations(zip(value, parts, strict=True)):
                yield dict(items)
    elif isinstance(value, list):
        for parts in product(*(list(orders(part)) for part in value)):
            yield list(parts)
    else:
        yield value


def main() -> int:
    """Check every file of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    checker = Checker()
    counts: Counter[str] = Counter()
    for file in sorted(folder.rglob("*.json")):
        for group in json.loads(file.read_text("utf-8")):
            name = f"{file.relative_to(folder)}: {group['description']}"
            for test in group["tests"]:
                try:
                    is_taken = checker.takes(group["schema"], test["data"])
                except RequestError as error:
                    counts["refused schemas"] += 1
                    print(f"refused: {name}: {error.message}")
                    break
                is_right = is_taken == test["valid"]
                end = "right" if is_right else "wrong" if is_taken else "narrower"
                counts[end] += 1
                if not is_right:
                    print(f"{end}: {name}: {test['description']}")
    print(dict(counts))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
