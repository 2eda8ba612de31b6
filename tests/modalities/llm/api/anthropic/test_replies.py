"""However an answer's text comes in pieces, its events and its message are the same."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from triptych.modalities.llm.api.anthropic.replies import Event, MessageFormatter, whole_message
from triptych.modalities.llm.api.generation import Generation
from triptych.modalities.llm.api.replies import UsageTotals
from triptych.modalities.llm.api.samples import FinishReason, SampleDelta
from triptych.modalities.llm.api.tools.formats import CALL_FORMATS, REASONING_FORMATS
from triptych.modalities.llm.api.tools.parser import AnswerParser

TOOLS = {"f": {"type": "object"}}
VALUES = st.dictionaries(st.text("ab \n", min_size=1, max_size=3), st.text('x"\\\n{}é', max_size=8))
WORDS = st.text("ab \n<é", max_size=12)


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Reasoning, words and calls, perhaps broken off."""
    reasoning = draw(st.none() | WORDS)
    parts = ["" if reasoning is None else f"<think>{reasoning}</think>"]
    for words, call in draw(st.lists(st.tuples(WORDS, st.none() | VALUES), max_size=3)):
        parts.append(words)
        if call is not None:
            called = json.dumps({"name": "f", "arguments": call}, ensure_ascii=False)
            parts.append(f"<tool_call>\n{called}\n</tool_call>")
    whole = "".join(parts)
    return whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole


def generation(texts: Sequence[str], reason: FinishReason, stop: str | None) -> Generation:
    """A call that answers with these texts."""
    parser = AnswerParser(REASONING_FORMATS["think"], CALL_FORMATS["hermes"], TOOLS)
    usage = UsageTotals(1)

    async def deltas() -> AsyncGenerator[SampleDelta, None]:
        for number, text in enumerate([*texts, ""]):
            is_last = number == len(texts)
            pieces = parser.push(text) + (parser.finish() if is_last else [])
            delta = SampleDelta(
                index=0,
                text=text,
                pieces=tuple(pieces),
                token_ids=(),
                logprobs=(),
                finish_reason=reason if is_last else None,
                stop_reason=stop if is_last else None,
                num_prompt_tokens=9,
                num_cached_tokens=4,
                num_output_tokens=7,
            )
            usage.add(delta)
            yield delta

    return Generation(deltas(), usage, 1)


def without_ids(content: Any) -> list[dict[str, Any]]:
    return [{key: part for key, part in block.items() if key != "id"} for block in content]


def read(events: Sequence[Event]) -> dict[str, Any]:
    """The message of events, as the public description says to put it together."""
    found: dict[str, Any] = {}
    texts: list[str] = []
    for event in [event.model_dump(exclude_unset=True) for event in events]:
        match event["type"]:
            case "message_start":
                found = event["message"]
            case "content_block_start":
                assert event["index"] == len(found["content"])
                found["content"].append(event["content_block"])
                texts.append("")
            case "content_block_delta":
                block, delta = found["content"][event["index"]], event["delta"]
                kind = delta.pop("type").removesuffix("_delta")
                if kind == "input_json":
                    texts[-1] += delta["partial_json"]
                else:
                    block[kind] += delta[kind]
            case "message_delta":
                found |= event["delta"] | {"usage": event["usage"]}
    for block, text in zip(found["content"], texts, strict=True):
        if block["type"] == "tool_use" and found["stop_reason"] == "tool_use":
            block["input"] = json.loads(text)
    return found


@given(answer=answers(), cuts=st.lists(st.integers(0, 200)), is_whole=st.booleans())
async def test_any_split_gives_the_same_message(
    answer: str, cuts: list[int], is_whole: bool
) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(answer)), len(answer)]
    texts = [answer[start:end] for start, end in pairwise(places)]
    has_call = "<tool_call>" in answer
    is_done = is_whole and answer.count("<tool_call>") == answer.count("</tool_call>")
    reason: FinishReason = ("tool_calls" if has_call else "stop") if is_done else "length"

    def formatter() -> MessageFormatter:
        return MessageFormatter("tiny", "1")

    streamed = [event async for event in formatter().events(generation(texts, reason, None))]
    in_one = await whole_message(formatter().events(generation([answer], reason, None)))
    in_pieces = await whole_message(formatter().events(generation(texts, reason, None)))
    one, pieces = in_one.model_dump(), in_pieces.model_dump()
    assert without_ids(pieces.pop("content")) == without_ids(one.pop("content"))
    assert pieces == one
    again = read(streamed)
    if reason != "length":
        assert without_ids(again["content"]) == without_ids(in_one.model_dump()["content"])
    else:  # the input of a call that broke off is as much of it as is JSON
        kinds = [block["type"] for block in again["content"]]
        assert kinds == [block.type for block in in_one.content]
    assert (again["stop_reason"], again["usage"]["output_tokens"]) == (in_one.stop_reason, 7)


async def test_a_call_that_broke_off_keeps_what_it_has() -> None:
    texts = ['<tool_call>\n{"name": "f", "arguments": {"a": "x", "b": "y']
    events = MessageFormatter("tiny", "1").events(generation(texts, "length", None))
    (block,) = (await whole_message(events)).content
    assert block.model_dump()["input"] == {"a": "x"}
