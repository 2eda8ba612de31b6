"""The formats in which families write calls and reasoning, and which of them a model has.

Owns their names, as `--tool-call-parser` and `--reasoning-parser` take them (with the names of
other servers as aliases), and the detection of a format from the chat template.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from triptych.core.errors import ConfigError
from triptych.core.options.config import ModelOptions
from triptych.modalities.llm.api.tools.harmony import harmony
from triptych.modalities.llm.api.tools.json_calls import (
    MarkedJson,
    NamedJson,
    bare_json,
    listed_json,
)
from triptych.modalities.llm.api.tools.parser import AnswerParser, ReasoningMarks, words_alone
from triptych.modalities.llm.api.tools.pieces import ReadCalls, ToolSchemas
from triptych.modalities.llm.api.tools.traits import supports_tools
from triptych.modalities.llm.api.tools.written_calls import TaggedParameters, pythonic

_DEEPSEEK = "<｜tool▁{}｜>".format  # noqa: RUF001 - DeepSeek's tokens have these characters
_DEEPSEEK_SEPARATOR = _DEEPSEEK("sep")
_DEEPSEEK_CALL = ((_DEEPSEEK("call▁begin"),), _DEEPSEEK_SEPARATOR, (_DEEPSEEK("call▁end"),))
_DEEPSEEK_MARKS = (_DEEPSEEK("calls▁begin"), _DEEPSEEK("calls▁end"))
_KIMI_MARKS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

CALL_FORMATS: Mapping[str, ReadCalls] = MappingProxyType(
    {
        "hermes": MarkedJson(("<tool_call>",), ("</tool_call>",), forgets_marks=True),
        "granite": MarkedJson(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
        "phi4-mini": MarkedJson(("functools", "<|tool_call|>"), ("<|/tool_call|>",)),
        "mistral": MarkedJson(("[TOOL_CALLS]",)),
        "mistral-named": NamedJson(("[TOOL_CALLS]",), "[ARGS]", ()),
        "llama3-json": bare_json,
        "llama4-pythonic": pythonic,
        "qwen3-coder": TaggedParameters(
            open="<tool_call>",
            name_open="<function=",
            name_end=">",
            key_open="<parameter=",
            key_close=">",
            value_close="</parameter>",
            closes=("</function>", "</tool_call>"),
        ),
        "glm": TaggedParameters(
            open="<tool_call>",
            name_end="\n",
            key_open="<arg_key>",
            key_close="</arg_key>",
            value_open="<arg_value>",
            value_close="</arg_value>",
            closes=("</tool_call>",),
        ),
        "seed": TaggedParameters(
            open="<seed:tool_call>",
            name_open="<function=",
            name_end=">",
            key_open="<parameter=",
            key_close=">",
            value_close="</parameter>",
            closes=("</function>", "</seed:tool_call>"),
        ),
        "deepseek-v3": NamedJson(*_DEEPSEEK_CALL, ignored=_DEEPSEEK_MARKS, has_fence=True),
        "deepseek-v31": NamedJson(*_DEEPSEEK_CALL, ignored=_DEEPSEEK_MARKS),
        "kimi-k2": NamedJson(
            ("<|tool_call_begin|>",),
            "<|tool_call_argument_begin|>",
            ("<|tool_call_end|>",),
            ignored=_KIMI_MARKS,
            prefix="functions.",
        ),
        "harmony": harmony,
    }
)

REASONING_FORMATS: Mapping[str, ReasoningMarks] = MappingProxyType(
    {
        "think": ReasoningMarks("<think>", "</think>"),
        "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
        "kimi": ReasoningMarks("◁think▷", "◁/think▷"),
        "seed": ReasoningMarks("<seed:think>", "</seed:think>"),
        "granite": ReasoningMarks("Here is my thought process:", "Here is my response:"),
    }
)

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("qwen", "qwen25", "qwen3", "smollm3", "xlam"), "hermes"),
        **dict.fromkeys(("llama3_json", "llama4_json", "llama3"), "llama3-json"),
        **dict.fromkeys(("pythonic", "llama4_pythonic"), "llama4-pythonic"),
        **dict.fromkeys(("qwen3_coder", "qwen3_xml"), "qwen3-coder"),
        **dict.fromkeys(("glm45", "glm47"), "glm"),
        **dict.fromkeys(("deepseek_v3", "deepseekv3"), "deepseek-v3"),
        **dict.fromkeys(("deepseek_v31", "deepseekv31"), "deepseek-v31"),
        **dict.fromkeys(("kimi_k2", "kimi"), "kimi-k2"),
        **dict.fromkeys(("openai", "gpt-oss", "gpt_oss"), "harmony"),
        **dict.fromkeys(("phi4_mini_json",), "phi4-mini"),
        **dict.fromkeys(("seed_oss",), "seed"),
        **dict.fromkeys(("deepseek_r1", "deepseek-r1", "glm45-thinking"), "think"),
    }
)

_PLAIN = frozenset({"hermes", "qwen3-coder", "glm"})
"""Formats whose marks are plain text."""

# In this order: the first mark that a template has names its format.
_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "harmony"),
    (("<seed:tool_call>",), "seed"),
    (("<tool_call>", "<function="), "qwen3-coder"),
    (("<tool_call>", "<arg_key>"), "glm"),
    (("<|tool_calls_section_begin|>",), "kimi-k2"),
    (("tool_declare<|im_middle|>",), "kimi-k2"),
    ((_DEEPSEEK_SEPARATOR, "```json"), "deepseek-v3"),
    ((_DEEPSEEK_SEPARATOR,), "deepseek-v31"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral-named"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call|>", "<|/tool_call|>"), "phi4-mini"),
    (("functools[",), "phi4-mini"),
    (("<|tool|>", "<|/tool|>"), "phi4-mini"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (('"parameters"', "<|python_tag|>"), "llama3-json"),
    (('{"name": function name, "parameters":',), "llama3-json"),
    (("[func_name1(",), "llama4-pythonic"),
    (("<|python_start|>",), "llama4-pythonic"),
)


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """How one model writes `calls` and marks `reasoning` (empty: not at all).

    `template_supports_tools`: its chat template renders `tools`. `has_special_marks`: marks may be
    special tokens, which answers do not show without a parser.
    """

    calls: str = "hermes"
    reasoning: str = ""
    template_supports_tools: bool = False
    has_special_marks: bool = False

    @classmethod
    def of(cls, template: str, options: ModelOptions, specials: Collection[str]) -> AnswerSyntax:
        """The operator's choice, or else the chat template's. Raises `ConfigError`."""
        calls = _find_format("--tool-call-parser", options.tool_call_parser, CALL_FORMATS)
        reasoning = _find_format("--reasoning-parser", options.reasoning_parser, REASONING_FORMATS)
        template_supports_tools = supports_tools(template)
        if calls is None:
            calls = call_format_of(template)
            # Harmony is the format of everything that gpt-oss writes.
            if not template_supports_tools and calls != "harmony":
                calls = "hermes"
        reasoning = reasoning_format_of(template) if reasoning is None else reasoning
        reasoning_marks = {REASONING_FORMATS[reasoning].open} if reasoning else set()
        return cls(
            calls,
            reasoning,
            template_supports_tools=template_supports_tools,
            has_special_marks=calls not in _PLAIN or not reasoning_marks.isdisjoint(specials),
        )

    def reads(self, tools: ToolSchemas) -> bool:
        """Whether an answer has to be parsed for reasoning or calls of `tools`."""
        return bool(tools) or self.has_reasoning

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning is separated from the answer."""
        return bool(self.reasoning or self.calls == "harmony")

    def reasoning_end(self, prompt_end: str) -> str:
        """The mark that ends reasoning which a prompt with this end has opened; empty if none."""
        reasoning = REASONING_FORMATS.get(self.reasoning)
        has_begun = reasoning is not None and prompt_end.rstrip().endswith(reasoning.open)
        return reasoning.close if reasoning is not None and has_begun else ""

    def parser(
        self, tools: ToolSchemas, prompt_end: str, *, is_forced: bool, has_form: bool = False
    ) -> AnswerParser:
        """The parser of one answer to a prompt with this end; of calls only, if `is_forced`.

        With `has_form`, JSON without marks is text and not a call.
        """
        read_calls: ReadCalls = words_alone
        if is_forced and self.calls != "hermes":
            read_calls = listed_json
        elif tools or self.calls == "harmony":
            read_calls = CALL_FORMATS[self.calls]
            if has_form and not is_forced:
                read_calls = _marks_alone(read_calls)
        return AnswerParser(
            REASONING_FORMATS.get(self.reasoning),
            read_calls,
            tools,
            is_reasoning=bool(self.reasoning_end(prompt_end)),
            is_forced=is_forced,
        )


def _marks_alone(read_calls: ReadCalls) -> ReadCalls:
    """The same format without calls that have no marks."""
    if isinstance(read_calls, MarkedJson):
        return replace(read_calls, forgets_marks=False)
    return words_alone if read_calls is bare_json else read_calls


def _find_format(option: str, value: str, known: Mapping[str, object]) -> str | None:
    """The format of that name; `None` for `auto`."""
    if value == "auto":
        return None
    name = ALIASES.get(value, value)
    if name == "none" and known is REASONING_FORMATS:
        return ""
    if name not in known:
        raise ConfigError(f"{option} {value}: unknown. Use auto or one of {', '.join(known)}.")
    return name


def call_format_of(template: str) -> str:
    """The format of calls in a chat template; Hermes's if there is none."""
    for marks, name in _MARKS:
        if all(mark in template for mark in marks):
            return name
    return "hermes"


def reasoning_format_of(template: str) -> str:
    """The format of reasoning in a template; empty if there is none."""
    for name, reasoning in REASONING_FORMATS.items():
        if reasoning.close in template or reasoning.open in template:
            return name
    return ""
