"""What a benchmark asks: prompts of a given length, alike for every server under test.

Owns prompt text. Knows no tokenizer: lengths are met by a measured number of tokens per word.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_TEXT = (
    "about after again air all along also always another answer any around ask away back because"
    " before begin below between big book both boy build call came can change city close come could"
    " country day different does down each earth eat end enough even every eye face family far"
    " father feet few find first follow food form found four from get girl give good great group"
    " grow hand hard head hear help here high home house idea important into just keep kind know"
    " land large last late learn leave left letter life light like line list little live long look"
    " made make man many may mean might mile miss more most mother mountain move much music must"
    " name near need never new next night now number often old only open other our over own page"
    " paper part people place plant play point read really right river run said same saw say school"
    " sea second see sentence set she should show side small some something sometimes song soon"
    " sound spell start state still stop story study such take talk tell than that their them then"
    " there these they thing think this those thought three through time together took tree try"
    " turn under until use very walk want watch water way well went were what when where which"
    " while white who why will with without word work world would write year young your"
)
WORDS: Sequence[str] = tuple(_TEXT.split())
"""Common English words, most of them one token in any vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths are in tokens; `shared_prefix_tokens` of each prompt are the same in one repeat."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0
    seed: int = 0

    def prompts(self, *, repeat: int, tokens_per_word: float) -> list[str]:
        """The prompts of one repeat. No repeat shares text with another, so caches start cold."""

        def text(name: str, num_tokens: int) -> str:
            source = random.Random(f"{self.seed}/{repeat}/{name}")  # noqa: S311 - not for secrets
            return " ".join(source.choices(WORDS, k=max(round(num_tokens / tokens_per_word), 1)))

        own = self.prompt_tokens - self.shared_prefix_tokens
        prefix = (
            text("prefix", self.shared_prefix_tokens) + " " if self.shared_prefix_tokens else ""
        )
        return [prefix + text(str(index), own) for index in range(self.num_requests)]
