"""Rows with grammars: a vocabulary, a model that samples allowed tokens, and an engine by hand."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from support.driver import SchedulerDriver
from support.engine_seams import Done, FakeRunner, next_token
from support.schedules import schedule_of
from support.text_models import SPECIALS, byte_tokenizer
from triptych.core.engine_api.plan import Plan, TokenPlan, TokenRow
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.grammar.compiler import GrammarCompiler
from triptych.core.grammar.constraint import ConstraintKind
from triptych.core.grammar.source import to_grammar
from triptych.core.grammar.vocabulary import GrammarVocabulary
from triptych.core.kv.pages import PagePool
from triptych.schedulers.tokens.grammar_worker import GrammarWorker
from triptych.schedulers.tokens.scheduler import TokenScheduler

VOCAB_SIZE = 300
"""Of a model whose tokenizer has 259 tokens, as is usual."""
EOS = 0
TOKENIZER = byte_tokenizer()
VOCABULARY = GrammarVocabulary(TOKENIZER, VOCAB_SIZE)
COMPILER = GrammarCompiler(VOCABULARY)


def allowed_ids(mask: bytes) -> list[int]:
    """The tokens of a mask."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def text_of(token_ids: Sequence[int]) -> str:
    """What tokens of the byte tokenizer spell."""
    return TOKENIZER.decode(list(token_ids), skip_special_tokens=False)


def ids_of(text: str) -> list[int]:
    """The byte tokenizer's tokens of a text."""
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def takes(schema: Any, value: Any) -> bool:
    """Whether the grammar of a schema takes a value, written as JSON."""
    matcher = COMPILER.compile(to_grammar("json_schema", json.dumps(schema)))
    ids = ids_of(json.dumps(value, ensure_ascii=False))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def guided_request(
    prompt: str, text: str = "", kind: ConstraintKind = "regex", **sampling: object
) -> TokenRequest:
    """A request whose answer follows `text`, if there is one."""
    given = {"max_tokens": 64, "stop_token_ids": (EOS,), **sampling}
    return TokenRequest(
        prompt_ids=tuple(ids_of(prompt)),
        sampling=SamplingParams(**given),  # type: ignore[arg-type]
        grammar=to_grammar(kind, text) if text else "",
    )


class MaskedRunner(FakeRunner):
    """Samples by the hash of all tokens before, among those that the mask has.

    Prints a text where there is no mask: letters alone, so that EOS never ends it.
    """

    def __init__(self, *, page_size: int) -> None:
        super().__init__(page_size=page_size, vocab_size=VOCAB_SIZE)
        self.plans: list[TokenPlan] = []

    def launch(self, plan: Plan) -> Done:
        assert isinstance(plan, TokenPlan)
        self.plans.append(plan)
        return super().launch(plan)

    def sample(self, row: TokenRow, context: Sequence[int]) -> int:
        choices = allowed_ids(row.allowed) if row.allowed else ids_of("abcdefgh")
        assert not set(choices) & set(range(1, len(SPECIALS))), "a special token is allowed"
        assert max(choices) < len(SPECIALS) + 256, "what is no token is allowed"
        return choices[next_token(context, len(choices))]


class ThinkingRunner(MaskedRunner):
    """Its reasoning is letters, of which one ends them."""

    def sample(self, row: TokenRow, context: Sequence[int]) -> int:
        if row.allowed and len(allowed_ids(row.allowed)) > VOCAB_SIZE // 2:
            assert EOS not in allowed_ids(row.allowed)
            row = TokenRow(job_id="", slot=0, start=0, num_tokens=1)
        return super().sample(row, context)


class GuidedWorld(SchedulerDriver):
    """The scheduler of tokens with grammars. What threads find comes when `find` is called."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        depth: int = 2,
        num_snapshots: int | None = None,
        **options: object,
    ) -> None:
        self.pool = PagePool(num_pages=num_pages, page_size=page_size, num_snapshots=num_snapshots)
        scheduler = TokenScheduler(
            model="guided",
            pool=self.pool,
            options=schedule_of(**options),
            max_length=160,
            namespace=b"guided",
        )
        self.runner: MaskedRunner
        super().__init__(scheduler, MaskedRunner(page_size=page_size), model="guided", depth=depth)
        self.calls: deque[Callable[[], None]] = deque()
        self.posted: deque[Callable[[], None]] = deque()
        scheduler.grammar_worker = GrammarWorker(
            lambda: VOCABULARY, start=lambda name: _Queue(self.calls)
        )
        scheduler.connect(self.posted.append)

    def find(self) -> bool:
        """The threads make one call, and the loop takes in what they found."""
        if not self.calls:
            return False
        self.calls.popleft()()
        while self.posted:
            self.posted.popleft()()
        return True

    def step(self) -> bool:
        while self.find():
            pass
        is_over = not super().step()
        return not (is_over and not self.calls)

    def deltas_of(self, job_id: str) -> list[TokenDelta]:
        """What a job was sent."""
        return [delta for delta in self.payloads(job_id) if isinstance(delta, TokenDelta)]

    def ids(self, job_id: str) -> list[int]:
        """The tokens a job was sent."""
        return [token_id for delta in self.deltas_of(job_id) for token_id in delta.token_ids]

    def text(self, job_id: str) -> str:
        """What they spell."""
        return text_of(self.ids(job_id))

    def reason(self, job_id: str) -> str | None:
        """Why a job ended."""
        final = self.outputs.final(job_id)
        assert final is not None
        return final.error.code if final.error is not None else final.payload.finish_reason

    def answer(self, request: TokenRequest) -> tuple[str, str | None]:
        """A request alone: its text, and why it ended."""
        self.submit("alone", request)
        self.run()
        return self.text("alone"), self.reason("alone")


class _Queue:
    """A thread that makes its calls on demand."""

    def __init__(self, calls: deque[Callable[[], None]]) -> None:
        self.put = calls.append

    def close(self, timeout_s: float | None = None) -> None: ...
