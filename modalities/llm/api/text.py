"""Between text and token ids: one model's tokenizer, chat template and limits.

Owns everything about a model that the API process needs. Runs no model code: the tokenizer is read
from `tokenizer.json`, the template runs in a sandbox in its own process. Text of a caller never
becomes a special token, whatever it spells, and is not tokenized where it cannot fit.
Knows nothing of torch, transformers or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from tokenizers import Tokenizer

from triptych.core.engine_api.tokens import ReasoningRules, TokenRequest
from triptych.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    UnsupportedOption,
    WeightsError,
)
from triptych.core.grammar.constraint import Constraint
from triptych.core.options.config import ModelOptions
from triptych.core.process.typed import decode_json
from triptych.core.text.context_length import context_length
from triptych.core.text.threads import on_text_thread
from triptych.core.text.token_bytes import TokenBytes
from triptych.core.text.tokenizer import (
    MinTokens,
    decode,
    encode,
    literal_copy,
    read_tokenizer,
)
from triptych.core.weights.layout import count_field, read_json, read_json_if_there
from triptych.core.weights.resolve import ResolvedModel
from triptych.core.weights.text_alone import text_alone
from triptych.modalities.llm.api.detokenizer import PRIMING_TOKENS, Detokenizer
from triptych.modalities.llm.api.grammars import GrammarChecker
from triptych.modalities.llm.api.infill import GapPrompt
from triptych.modalities.llm.api.multimodal import Message, words_of
from triptych.modalities.llm.api.specials import SpecialTokens, ensure_special
from triptych.modalities.llm.api.template import ChatTemplate, cut_at_mark, mark_last
from triptych.modalities.llm.api.tools.forced import answer_constraint
from triptych.modalities.llm.api.tools.formats import AnswerSyntax
from triptych.modalities.llm.api.tools.parser import AnswerParser
from triptych.modalities.llm.api.tools.reasoning_rules import reasoning_rules
from triptych.modalities.llm.api.tools.schema import ToolSet
from triptych.modalities.llm.api.tools.traits import TemplateTraits

_USUAL_ANSWER = 256  # tokens that further files leave for an answer of any length
_PROMPT_END = 16  # tokens: enough to see whether the prompt has opened the reasoning
_MANY_CHARS = 2**17
_TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
_ENTRY_CHARS = 16
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """The API process's view of one text model."""

    name: str
    digest: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float]
    template: ChatTemplate | None
    template_tokens: Mapping[str, str]
    template_defaults: Mapping[str, Any]
    traits: TemplateTraits
    tokenizer_info: Mapping[str, Any]
    """The fields of tokenizer_config.json, without paths of files, and the chat template."""
    answers: AnswerSyntax
    reasoning: ReasoningRules | None
    """How reasoning is counted; `None` without reasoning, or where its marks are not tokens."""
    reasoning_budget: int
    """Default limit of reasoning tokens; -1 for no limit."""
    tokenizer: Tokenizer
    literal_tokenizer: Tokenizer
    """Reads special tokens as the characters they are spelled with."""
    specials: SpecialTokens
    least_tokens: MinTokens
    token_bytes: TokenBytes
    grammars: GrammarChecker
    gap: GapPrompt | None = None
    """How it is asked to fill a gap, if it was trained to."""
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def open(
        cls,
        resolved: ResolvedModel,
        options: ModelOptions,
        *,
        text_config: Mapping[str, Any] = MappingProxyType({}),
        specials: Sequence[str] = (),
    ) -> TextModel:
        """Read tokenizer, template and limits from a resolved model's folder.

        `text_config` overrides `config.json` for models of more than text; `specials` are tokens
        that the tokenizer may lack. Raises `WeightsError` when the folder lacks a file that chat
        needs, `ConfigError` for a bad `--chat-template`.
        """
        folder = Path(resolved.folder)
        config = {**text_alone(read_json(folder / "config.json")), **text_config}
        tokenizer_config = read_json_if_there(folder / "tokenizer_config.json")
        generation = read_json_if_there(folder / "generation_config.json")
        tokens = _named_tokens(tokenizer_config)
        own_length = context_length(config.get)
        if options.max_length > own_length:
            raise ConfigError(
                f"--max-length {options.max_length} is over the {own_length} tokens that"
                f" {resolved.name} supports."
            )
        tokenizer = read_tokenizer(folder, resolved.name)
        ensure_special(tokenizer, specials)
        vocab_size = count_field(config, "vocab_size")
        template = ChatTemplate.find(folder, tokenizer_config, options, model=resolved.name)
        special_tokens = SpecialTokens(tokenizer)
        source = "" if template is None else template.source
        answers = AnswerSyntax.of(source, options, special_tokens.ids)
        return cls(
            name=resolved.name,
            digest=resolved.digest,
            context_length=options.max_length or own_length,
            vocab_size=vocab_size,
            eos_token_ids=_eos_ids(tokenizer, tokens, (generation, config)),
            default_sampling=_default_sampling(generation),
            template=template,
            template_tokens=tokens,
            template_defaults=_template_defaults(options.default_chat_template_kwargs),
            traits=TemplateTraits(source, answers.calls),
            tokenizer_info=_tokenizer_info(tokenizer_config, source),
            answers=answers,
            reasoning=_reasoning_rules(answers, tokenizer, options, resolved.name),
            reasoning_budget=options.reasoning_budget,
            tokenizer=tokenizer,
            literal_tokenizer=literal_copy(tokenizer),
            specials=special_tokens,
            least_tokens=MinTokens.of(tokenizer),
            token_bytes=TokenBytes(tokenizer),
            grammars=GrammarChecker(folder, vocab_size),
            gap=GapPrompt.of(tokenizer),
        )

    def start(self) -> None:
        """Start the template process, so that the first conversation does not wait for it."""
        if self.template is not None:
            self.template.start()

    def warm(self) -> None:
        """Start a grammar checker, so that the first constrained answer does not wait for it.

        It keeps its memory, so it starts only for models whose template supports tools.
        """
        if self.answers.template_supports_tools:
            self.grammars.start()

    async def close(self) -> None:
        """Stop the processes of the template and the grammar checker."""
        await self.grammars.close()
        if self.template is not None:
            await self.template.close()

    def encode_text(
        self,
        text: str,
        *,
        parse_special: bool = False,
        add_special_tokens: bool = True,
        may_exceed: bool = False,
    ) -> tuple[int, ...]:
        """Token ids of plain text, with the model's initial tokens if `add_special_tokens`.

        Special tokens spelled in `text` are read as plain characters unless `parse_special`. Raises
        `ContextLengthExceeded` before tokenizing a text that cannot fit, unless it `may_exceed` the
        context.
        """
        if not may_exceed:
            self._check_least(text)
        tokenizer = self.tokenizer if parse_special else self.literal_tokenizer
        (encoding,) = encode(tokenizer, [text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def encode_gap(
        self,
        before: str,
        after: str,
        *,
        extra: Sequence[tuple[str, str]] = (),
        num_answer: int | None = None,
        parse_special: bool = False,
        add_special_tokens: bool = True,
    ) -> tuple[int, ...]:
        """Token ids of a prompt for the text between two others.

        `extra` are names and texts of further files, the first of which are left out where they
        would leave less than `num_answer` tokens of the context. `parse_special` and
        `add_special_tokens` are those of `encode_text`. Raises `UnsupportedOption` for a model that
        was not trained to fill gaps, and the errors of `encode_text`.
        """
        if self.gap is None:
            raise UnsupportedOption(
                f"{self.name} was not trained to fill gaps: leave suffix out, or serve a model for"
                " code, such as qwen2.5-coder-0.5b.",
                param="suffix",
            )
        start = self.encode_text("", add_special_tokens=add_special_tokens)

        def encode(text: str) -> tuple[int, ...]:
            return self.encode_text(text, parse_special=parse_special, add_special_tokens=False)

        ids = self.gap.ids(encode(before), encode(after))
        room = self.context_length - len(start) - len(ids) - (num_answer or _USUAL_ANSWER)
        return (*start, *(self.gap.further(extra, encode, room) if extra else ()), *ids)

    async def encode_messages(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tenant: str = "",
        **template_kwargs: Any,
    ) -> TokenRequest:
        """Implements `multimodal.PromptEncoder` for conversations without images."""
        plain = [{**message, "content": words_of(message.get("content"))} for message in messages]
        given = [plain, list(tools)]
        escaped = await self.escape(given)
        rendered = await self.render(escaped[0], tools=escaped[1], **template_kwargs)
        ids = await self.encode_rendered(rendered, has_stand_ins=escaped != given)
        return TokenRequest(prompt_ids=ids, tenant=tenant)

    async def escape(self, given: Sequence[Any]) -> list[Any]:
        """The caller's values with a stand-in for each special token that they spell."""
        escaped: list[Any] = await on_text_thread(text_size(given), self.specials.escape, given)
        return escaped

    async def encode_rendered(self, rendered: str, *, has_stand_ins: bool) -> tuple[int, ...]:
        """Token ids of a rendered conversation, with stand-ins read as the caller's characters.

        Raises `ContextLengthExceeded` before tokenizing a conversation that cannot fit.
        """
        work = self._encode_runs if has_stand_ins else self._encode_whole
        return await on_text_thread(len(rendered), work, rendered)

    async def render(
        self,
        messages: Sequence[Message],
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        **template_kwargs: Any,
    ) -> str:
        """The conversation rendered by the chat template.

        With `continue_final_message` it ends with the last message's text. Raises `InvalidRequest`
        when there is no template, and as `ChatTemplate.render` does.
        """
        if continue_final_message:
            messages = mark_last(messages)
            return cut_at_mark(await self.render(messages, tools=tools, **template_kwargs))
        if self.template is None:
            raise InvalidRequest(
                f"{self.name} has no chat template: use /v1/completions, or start with"
                " --chat-template FILE.",
                param="messages",
            )
        given = {**self.template_defaults, **template_kwargs}
        values = {"add_generation_prompt": True, **given, **self.template_tokens}
        size = text_size([messages, tools])
        messages, tools = await on_text_thread(size, self.traits, messages, tools)
        if tools:
            values["tools"] = tools
        return await self.template.render(messages, **values)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Raises `InvalidRequest` for unknown ids."""
        if any(not 0 <= token_id < self.vocab_size for token_id in token_ids):
            raise InvalidRequest(
                f"Token ids lie between 0 and {self.vocab_size - 1}.", param="tokens"
            )
        return decode(self.tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self, prompt_ids: Sequence[int], stops: Sequence[str], **options: bool
    ) -> Detokenizer:
        """An incremental decoder for one row that continues `prompt_ids`.

        `options` are those of `Detokenizer`.
        """
        words = (token_id for token_id in reversed(prompt_ids) if token_id < self.vocab_size)
        end = [*islice(words, PRIMING_TOKENS)][::-1]
        return Detokenizer(self.tokenizer, end, stops, **options)

    def answer_parser(
        self, prompt_ids: Sequence[int], tool_set: ToolSet, *, has_form: bool = False
    ) -> AnswerParser | None:
        """The parser of an answer to this prompt; `None` where the answer is only text.

        With `has_form`, JSON without marks is text and not a call.
        """
        if not self.answers.reads(tool_set.schemas):
            return None
        end = self._end_of(prompt_ids)
        return self.answers.parser(
            tool_set.schemas, end, is_forced=tool_set.is_required, has_form=has_form
        )

    def answer_constraint(
        self, prompt_ids: Sequence[int], tool_set: ToolSet, form: Constraint | None
    ) -> Constraint | None:
        """The constraint of answers to this prompt that follows from `form` and tools, if any.

        It covers the reasoning where the engine cannot see the end of it.
        """
        reasoning_end = self.answers.reasoning_end(self._end_of(prompt_ids))
        if self.reasoning is not None:
            reasoning_end = ""
        return answer_constraint(tool_set, self.answers, reasoning_end, form)

    def reasoning_rules(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int | None,
        *,
        has_form: bool,
        is_marked: bool = False,
    ) -> ReasoningRules | None:
        """The engine's rules for reasoning in an answer to this prompt, if it needs any.

        `max_tokens` limits the reasoning tokens: -1 is no limit, `None` the operator's limit. With
        `is_marked` the engine has to know of reasoning in any case.
        Raises `UnsupportedOption` for a limit where reasoning tokens cannot be counted.
        """
        budget = self.reasoning_budget if max_tokens is None else max_tokens
        if self.reasoning is None:
            if budget >= 0 and self.answers.has_reasoning:
                raise UnsupportedOption(
                    f"{self.name} marks reasoning with words and not with special tokens, so"
                    " reasoning tokens cannot be counted: leave the budget out.",
                    param="thinking_budget",
                )
            return None
        is_open = bool(self.answers.reasoning_end(self._end_of(prompt_ids)))
        if budget < 0 and not (is_open and has_form) and not is_marked:
            return None
        if has_form and not is_open and not self._may_be_text(self.reasoning.ending):
            return None  # no grammar allows such a mark
        return msgspec.structs.replace(
            self.reasoning, max_tokens=None if budget < 0 else budget, open_at_start=is_open
        )

    def _may_be_text(self, token_ids: Sequence[int]) -> bool:
        return not any(map(self.token_bytes.is_special, token_ids))

    def _end_of(self, prompt_ids: Sequence[int]) -> str:
        end = [token_id for token_id in prompt_ids[-_PROMPT_END:] if token_id < self.vocab_size]
        return self.decode(end, skip_special_tokens=False)

    def _check_least(self, text: str) -> None:
        least = self.least_tokens(text)
        if least > self.context_length:
            raise ContextLengthExceeded(
                f"{self.name} takes {self.context_length} tokens of context; this text has at least"
                f" {least}. Shorten it."
            )

    def _encode_whole(self, rendered: str) -> tuple[int, ...]:
        self._check_least(rendered)
        (encoding,) = encode(self.tokenizer, [rendered], add_special_tokens=False)
        return tuple(encoding.ids)

    def _encode_runs(self, rendered: str) -> tuple[int, ...]:
        """Encode text whose special tokens all come from the template."""
        runs = list(self.specials.runs(rendered))
        texts = [run for run in runs if isinstance(run, str)]
        self._check_least("".join(texts))
        encodings = iter(encode(self.literal_tokenizer, texts, add_special_tokens=False))
        ids: list[int] = []
        for run in runs:
            ids += [run] if isinstance(run, int) else next(encodings).ids
        return tuple(ids)


def text_size(given: Any) -> int:
    """The size in characters of all texts and entries in `given`; stops at a large number."""
    size, rest = 0, [given]
    while rest and size < _MANY_CHARS:
        value = rest.pop()
        if isinstance(value, str):
            size += len(value)
            continue
        size += _ENTRY_CHARS
        if isinstance(value, list | tuple):
            rest.extend(value)
        elif isinstance(value, Mapping):
            rest.extend(value.values())
    return size


def _reasoning_rules(
    answers: AnswerSyntax, tokenizer: Tokenizer, options: ModelOptions, name: str
) -> ReasoningRules | None:
    """Raises `ConfigError` for a budget of reasoning tokens that cannot be counted."""
    rules = reasoning_rules(answers, tokenizer)
    if rules is None and answers.has_reasoning and options.reasoning_budget >= 0:
        raise ConfigError(
            f"--reasoning-budget: {name} marks reasoning with words and not with special tokens, so"
            " reasoning tokens cannot be counted; leave it out."
        )
    return rules


def _template_defaults(given: str) -> dict[str, Any]:
    """The values for templates that the operator sets. Raises `ConfigError`."""
    flag = "--default-chat-template-kwargs"
    try:
        values = decode_json(given or "{}", dict[str, Any])
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(
            f'{flag} is a JSON object, such as {{"enable_thinking": false}}: {error}.'
        ) from error
    if taken := _TEMPLATE_NAMES & values.keys():
        raise ConfigError(
            f"{flag}: {', '.join(sorted(taken))} is set by each request; leave it out."
        )
    return values


def _named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and other tokens that templates use by name."""
    named = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer_config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[key] = value
    return named


def _tokenizer_info(config: Mapping[str, Any], template: str) -> dict[str, Any]:
    known = {
        name: value
        for name, value in config.items()
        if not name.endswith("_file") and name != "name_or_path"
    }
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **known}
    return {**named, "chat_template": template} if template else named


def _eos_ids(
    tokenizer: Tokenizer, tokens: Mapping[str, str], configs: Sequence[Mapping[str, Any]]
) -> tuple[int, ...]:
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        given = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in given):
            raise WeightsError(
                "eos_token_id in config.json or generation_config.json is not a token id."
            )
        found.update(given)
    if "eos_token" in tokens:
        token_id = tokenizer.token_to_id(tokens["eos_token"])
        found.update([token_id] if token_id is not None else [])
    return tuple(sorted(found))


def _default_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    given = {name: generation[name] for name in _SAMPLING_DEFAULTS if generation.get(name)}
    for name, value in given.items():
        if not isinstance(value, int | float):
            raise WeightsError(f"generation_config.json: {name} must be a number.")
    return given
