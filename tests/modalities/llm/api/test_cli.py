"""`triptych chat` and `triptych generate`: what they read, print and write."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.hosts import hosted
from support.text_models import ScriptedClient, write_text_folder
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import ConfigError, InvalidRequest, NonFinite
from triptych.core.options.config import ModelOptions, ScheduleOptions
from triptych.core.process import logs
from triptych.modalities.llm.api import cli, generate_cli
from triptych.modalities.llm.api.pipeline import ChatAnswer, ChatPipeline
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.text import TextModel
from triptych.schedulers.admission import Admission

Run = Callable[..., int]


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[ChatPipeline]:
    """A pipeline whose model answers every prompt with "ok", and "boom" with an error."""
    model = TextModel.open(write_text_folder(tmp_path / "model"), ModelOptions())
    boom = model.encode_text("boom")

    def script(request: TokenRequest) -> Sequence[TokenDelta]:
        ids = request.prompt_ids
        if any(ids[at : at + 4] == boom for at in range(len(ids))):
            raise NonFinite("The model produced NaN.")
        return [
            TokenDelta(token_ids=model.encode_text("ok")),
            TokenDelta(finish_reason="stop", stop_token_id=2),
        ]

    admission = Admission(options=ScheduleOptions(max_batch_size=2, max_queue_size=6))
    service = LlmService(ScriptedClient(script), [model], admission)
    with ChatPipeline("tiny", hosted(service, "tiny")) as opened:
        yield opened


@pytest.fixture
def generate(pipeline: ChatPipeline, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(generate_cli, "_open_pipeline", lambda args: pipeline)

    def run(*argv: str) -> int:
        parser = argparse.ArgumentParser()
        generate_cli.add_arguments(parser)
        return generate_cli.run(parser.parse_args(argv))

    return run


@pytest.fixture
def chat(pipeline: ChatPipeline) -> Run:
    def run(*argv: str) -> int:
        parser = argparse.ArgumentParser()
        cli.add_chat_arguments(parser)
        return cli.run_chat(parser.parse_args(argv), lambda args: pipeline)

    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_lines_come_back_in_order_with_their_answers(generate: Run, tmp_path: Path) -> None:
    entries = [
        {"prompt": "one", "max_tokens": 3, "id": 7},
        {"messages": [{"role": "user", "content": "two"}], "custom_id": "b", "n": 2},
        {"prompt": "line\u2028separator"},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries))
    assert generate("-i", str(source), "-o", str(target)) == 0
    found = lines(target)
    for line, entry in zip(found, entries, strict=True):
        assert {name: line[name] for name in entry} == entry
    assert [line["text"] for line in found] == ["ok"] * 3
    assert [line.get("texts") for line in found] == [None, ["ok", "ok"], None]
    assert [line["completion_tokens"] for line in found] == [3, 6, 3]


@pytest.mark.parametrize("stop", ["", [], None])
def test_what_stops_nothing_in_a_line_is_what_it_is_over_http(
    generate: Run, tmp_path: Path, stop: Any
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "one", "max_tokens": 3, "stop": stop}))
    assert generate("-i", str(source), "-o", str(target)) == 0
    assert [line["text"] for line in lines(target)] == ["ok"]


BAD = [
    {"prompt": 5},
    {"prompt": "x", "stop": 5},
    {"prompt": "x", "max_tokens": "x"},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": "x", "n": "3"},
    {"prompt": "x", "seed": "q"},
    {"prompt": "x", "seed": 2**70},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "temprature": 1},
    {"prompt": ["a", "b"]},
    {"messages": [1, 2]},
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    {"messages": [{"content": "x"}]},
    {"prompt": "boom"},
]


def test_a_bad_line_becomes_an_error_line_and_harms_no_other(generate: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = {"prompt": "fine"}
    source.write_text("\n".join(json.dumps(line) for bad in BAD for line in (bad, good)))
    assert generate("-i", str(source), "-o", str(target), "--batch", "3") == 1
    found = lines(target)
    assert [line["text"] for line in found[1::2]] == ["ok"] * len(BAD)
    codes = [line["error"]["code"] for line in found[::2]]
    assert codes == ["invalid_request"] * (len(BAD) - 1) + ["non_finite"]


def test_lines_that_are_no_objects_are_error_lines(generate: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{nonsense}\n[1]\n{"prompt": "x"}')
    assert generate("-i", str(source), "-o", str(target)) == 1
    found = lines(target)
    assert [line["line"] for line in found[:2]] == [1, 2]
    assert [line["error"]["code"] for line in found[:2]] == ["invalid_request"] * 2
    assert found[2]["text"] == "ok"


def batch_line(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    fields = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    return {"custom_id": custom_id, **fields, **changes}


def test_lines_of_an_openai_batch_are_answered(generate: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = batch_line("a")["body"]
    entries = [
        batch_line("a"),
        batch_line("b", body={**body, "max_completion_tokens": 3}),
        batch_line("c", body={**body, "model": "other"}),
        batch_line("d", url="/v1/embeddings"),
        batch_line("e", body=[]),
        batch_line("f", colour="red"),
    ]
    source.write_text("\n".join(map(json.dumps, entries)))
    assert generate("-i", str(source), "-o", str(target)) == 1
    found = lines(target)
    assert [line["custom_id"] for line in found] == list("abcdef")
    assert [line.get("text") for line in found] == ["ok", "ok", None, None, None, None]
    codes = [line["error"]["code"] for line in found[2:]]
    assert codes == ["model_not_found", *["invalid_request"] * 3]


def test_a_second_run_answers_what_is_left(
    generate: Run, pipeline: ChatPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def count(entries: Sequence[Any], **options: Any) -> Any:
        asked.append([entry["prompt"] for entry in entries])
        return ChatPipeline.map(pipeline, entries, **options)

    monkeypatch.setattr(pipeline, "map", count)
    monkeypatch.setattr(pipeline, "close", lambda: None)
    folder, target = tmp_path / "in", tmp_path / "out.jsonl"
    folder.mkdir()
    (folder / "1.jsonl").write_text('{"prompt": "one"}\n{"prompt": "boom"}\n')
    (folder / "2.jsonl").write_text('{"prompt": "two"}\n{"prompt": "two"}')
    assert generate("-i", str(folder), "-o", str(target)) == 1
    whole = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(whole[:2]) + whole[2][:30])  # it was killed as it wrote
    (folder / "0.jsonl").write_text('{"prompt": "zero"}\n')
    assert generate("-i", str(folder), "-o", str(target)) == 1
    assert generate("-i", str(folder), "-o", str(target), "--max-tokens", "5") == 1
    assert asked == [
        ["one", "boom", "two", "two"],
        ["zero", "boom", "two", "two"],
        ["zero", "one", "boom", "two", "two"],
    ]
    assert [line["prompt"] for line in lines(target)] == asked[-1]
    assert len({line["row"] for line in lines(target)}) == 5


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), "No prompts"),
        (("-i", "absent.jsonl"), "--input absent.jsonl: cannot be read"),
        (("hi", "-o", "absent/out.jsonl"), "--output absent/out.jsonl: cannot be written"),
        (("hi", "--batch", "0"), "--batch"),
        (("hi", "--replicas", "2"), "--replicas needs --ray-address"),
        (("hi", "--ray-address", "auto"), "-o answers.jsonl"),
        (("-i", "empty.jsonl"), "no rows"),
        (("-i", "latin.jsonl"), "UTF-8"),
    ],
)
def test_wrong_use_is_one_line(
    generate: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: Sequence[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(ConfigError, match=expected):
        generate(*argv)


def test_one_shot_prints_the_answer_alone(chat: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat("hello", "there") == 0
    assert capsys.readouterr().out == "ok\n"


def test_a_conversation_remembers_forgets_and_survives_a_bad_turn(
    chat: Run,
    pipeline: ChatPipeline,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = iter(["first", "[/]" * 200, "second", "/reset", "", "third", "/exit"])
    asked: list[list[Any]] = []

    def stream(messages: list[Any], **options: Any) -> Any:
        asked.append([message["content"] for message in messages])
        return ChatPipeline.stream(pipeline, messages, **options)

    monkeypatch.setattr(pipeline, "stream", stream)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert chat("--system", "be") == 0
    assert asked[0] == ["be", "first"]
    assert asked[2] == ["be", "first", "ok", "second"]
    assert asked[3] == ["be", "third"]
    captured = capsys.readouterr()
    assert captured.out == "ok\n" * 3
    assert "do not fit" in captured.err


def test_control_c_ends_the_answer_but_not_the_conversation(
    chat: Run, pipeline: ChatPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["first", "second", "/exit"])
    asked: list[list[Any]] = []

    def stream(messages: list[Any], **options: Any) -> Any:
        asked.append([message["content"] for message in messages])
        yield "par"
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "stream", stream)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert chat() == 0
    assert asked == [["first"], ["first", "par", "second"]]


@pytest.mark.parametrize("argv", [("hello",), ()])
def test_control_c_ends_a_one_shot(
    chat: Run, pipeline: ChatPipeline, monkeypatch: pytest.MonkeyPatch, argv: Sequence[str]
) -> None:
    def stream(messages: list[Any], **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "stream", stream)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    monkeypatch.setattr("sys.stdin.read", lambda: "piped")
    with pytest.raises(KeyboardInterrupt):
        chat(*argv)


@pytest.mark.parametrize("level", ["debug", None])
def test_a_log_level_is_honoured_where_it_is_given(
    pipeline: ChatPipeline, monkeypatch: pytest.MonkeyPatch, level: str | None
) -> None:
    configured: list[str] = []
    monkeypatch.setattr(logs, "configure", lambda options: configured.append(options.log_level))
    monkeypatch.setattr(ChatPipeline, "from_config", lambda *args, **options: pipeline)
    parser = argparse.ArgumentParser()
    cli.add_chat_arguments(parser)
    argv = ["hi", *(["--log-level", level] if level else [])]
    assert cli.run_chat(parser.parse_args(argv), ChatPipeline.from_arguments) == 0
    assert configured == ([level] if level else [])


def test_a_closed_pipeline_says_so(pipeline: ChatPipeline) -> None:
    with pipeline:
        pipeline.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipeline("hi")


def test_a_batch_may_be_larger_than_the_queue(pipeline: ChatPipeline) -> None:
    replies = pipeline(["one", "two"] * 10, n=3)
    assert isinstance(replies, list)
    assert [[sample.text for sample in reply.samples] for reply in replies] == [["ok"] * 3] * 20
    with pytest.raises(InvalidRequest, match="at most 8"):
        pipeline("one", n=9)
    answers = list(pipeline.map([{"prompt": "one"}] * 20, n=2))
    assert all(isinstance(answer, ChatAnswer) for answer in answers)


async def test_messages_from_python_are_checked(pipeline: ChatPipeline) -> None:
    reply = await pipeline.acall("hi")
    assert isinstance(reply, ChatAnswer)
    with pytest.raises(InvalidRequest, match="text"):
        await pipeline.acall([{"role": "user", "content": 5}])
