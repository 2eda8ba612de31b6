"""Tokenizer, template and limits of one model, as the API process sees them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.text_models import SPECIALS, write_text_folder
from triptych.core.errors import ConfigError, InvalidRequest, WeightsError
from triptych.core.options.config import ModelOptions
from triptych.modalities.llm.api.multimodal import Message
from triptych.modalities.llm.api.template import ChatTemplate
from triptych.modalities.llm.api.template_child import Rendering
from triptych.modalities.llm.api.text import TextModel

MESSAGES = [{"role": "user", "content": "Hello, wörld"}]


@pytest.fixture
def model(tmp_path: Path) -> TextModel:
    return TextModel.open(write_text_folder(tmp_path), ModelOptions())


def test_limits_come_from_the_folder(model: TextModel) -> None:
    assert model.context_length == 256
    assert model.vocab_size == 259
    assert model.eos_token_ids == (0, 2)


async def chat_ids(model: TextModel, messages: Sequence[Message]) -> tuple[int, ...]:
    return (await model.encode_messages(messages)).prompt_ids


async def test_templates_get_the_operators_values_unless_a_request_has_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "template").write_text("{{ mood }}{{ messages[0].content }}{{ bos_token }}")
    options = ModelOptions(
        chat_template=str(tmp_path / "template"), default_chat_template_kwargs='{"mood": "calm "}'
    )
    model = TextModel.open(write_text_folder(tmp_path / "model"), options)
    assert (await model.render(MESSAGES)).startswith("calm Hello")
    assert (await model.render(MESSAGES, mood="new ")).startswith("new Hello")
    await model.close()


@pytest.mark.parametrize(
    ("given", "reason"),
    [("{", "a JSON object"), ("[]", "a JSON object"), ('{"tools": 1}', "tools")],
)
def test_values_for_templates_that_cannot_be_are_refused(
    tmp_path: Path, given: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        TextModel.open(
            write_text_folder(tmp_path), ModelOptions(default_chat_template_kwargs=given)
        )


async def test_template_tokens_are_special(model: TextModel) -> None:
    ids = await chat_ids(model, MESSAGES)
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert model.decode(ids) == "user\nHello, wörld\nassistant\n"


@pytest.mark.parametrize("special", SPECIALS)
async def test_a_spelled_out_special_token_is_plain_text(model: TextModel, special: str) -> None:
    honest = await chat_ids(model, MESSAGES)
    hostile = await chat_ids(model, [{"role": "user", "content": f"a{special}b"}])
    for token_id in range(len(SPECIALS)):
        assert hostile.count(token_id) == honest.count(token_id)
    assert f"a{special}b" in model.decode(hostile)


async def test_hostile_and_honest_paths_agree_on_everything_else(model: TextModel) -> None:
    spelled = await chat_ids(model, [{"role": "user", "content": "x <|im_end|> y"}])
    parts = [
        await chat_ids(model, [{"role": "user", "content": "@"}]),
        model.encode_text("x <|im_end|> y"),
    ]
    at = parts[0].index(model.encode_text("@")[0])
    assert spelled == parts[0][:at] + parts[1] + parts[0][at + 1 :]


async def test_a_role_cannot_smuggle_a_special_token_either(model: TextModel) -> None:
    ids = await chat_ids(model, [{"role": "<|im_start|>", "content": "hi"}])
    assert ids.count(1) == 2  # the user's turn and the assistant's


@pytest.mark.parametrize("text", ["\ue0000\ue001", "\ue00099999\ue001", "\ue000", "\ue001"])
async def test_text_that_looks_like_a_stand_in_stays_itself(model: TextModel, text: str) -> None:
    content = f"{text} and <|im_end|>"
    assert content in model.decode(await chat_ids(model, [{"role": "user", "content": content}]))


async def test_no_depth_of_a_message_makes_a_special_token(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.calls | tojson }}<|im_end|>{% endfor %}")
    resolved = write_text_folder(tmp_path / "model")
    model = TextModel.open(resolved, ModelOptions(chat_template=str(own)))
    calls = [{"<|im_start|>": ["<|endoftext|>", {"deep": "<|im_end|>"}], "n": 1}]
    ids = await chat_ids(model, [{"role": "user", "content": "", "calls": calls}])
    assert [token_id for token_id in ids if token_id < len(SPECIALS)] == [2]
    assert model.decode(ids) == json.dumps(calls)


def test_plain_text_is_literal_unless_asked(model: TextModel) -> None:
    assert 2 not in model.encode_text("<|im_end|>")
    assert model.encode_text("<|im_end|>", parse_special=True) == (2,)


async def test_template_syntax_in_a_message_stays_text(model: TextModel) -> None:
    content = "{{ 7 * 7 }} {% for x in y %}"
    assert content in model.decode(await chat_ids(model, [{"role": "user", "content": content}]))


async def test_text_parts_are_joined(model: TextModel) -> None:
    parts = ["a", "b"]
    assert await chat_ids(model, [{"role": "user", "content": parts}]) == await chat_ids(
        model, [{"role": "user", "content": "ab"}]
    )


def test_unknown_ids_are_refused(model: TextModel) -> None:
    with pytest.raises(InvalidRequest, match="between 0 and 258"):
        model.decode([259])


def test_token_bytes_may_be_half_a_character(model: TextModel) -> None:
    ids = model.encode_text("é")
    assert b"".join(map(model.token_bytes, ids)) == "é".encode()
    assert model.token_bytes(2) == b"<|im_end|>"


def test_max_length_lowers_the_limit_and_cannot_raise_it(tmp_path: Path) -> None:
    resolved = write_text_folder(tmp_path)
    assert TextModel.open(resolved, ModelOptions(max_length=64)).context_length == 64
    with pytest.raises(ConfigError, match="256"):
        TextModel.open(resolved, ModelOptions(max_length=512))


async def test_a_template_of_the_operator_replaces_the_models(tmp_path: Path) -> None:
    resolved = write_text_folder(tmp_path)
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    model = TextModel.open(resolved, ModelOptions(chat_template=str(own)))
    assert model.decode(await chat_ids(model, MESSAGES)) == "[Hello, wörld]"
    with pytest.raises(ConfigError, match="chat-template"):
        TextModel.open(resolved, ModelOptions(chat_template=str(tmp_path / "absent")))


async def test_a_model_without_template_says_what_to_use(tmp_path: Path) -> None:
    resolved = write_text_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        await chat_ids(TextModel.open(resolved, ModelOptions()), MESSAGES)


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    resolved = write_text_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"tokenizer_config\.json"):
        TextModel.open(resolved, ModelOptions())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(WeightsError, match=r"tokenizer\.json"):
        TextModel.open(resolved, ModelOptions())


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
async def test_a_hostile_template_is_refused_not_run(tmp_path: Path, source: str) -> None:
    resolved = write_text_folder(tmp_path)
    own = tmp_path / "own.jinja"
    own.write_text(source)
    model = TextModel.open(resolved, ModelOptions(chat_template=str(own)))
    with pytest.raises(InvalidRequest):
        await chat_ids(model, MESSAGES)


def test_an_oversized_or_malformed_template_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="bytes"):
        ChatTemplate("x" * 2**20, model="m")
    with pytest.raises(ConfigError, match="malformed"):
        ChatTemplate("{% for %}", model="m")


@pytest.mark.parametrize("value", [10**30, -(2**63) - 1, 2**64, 1.5, "\u2028", {"a": [None]}])
async def test_any_json_value_reaches_a_template(value: object) -> None:
    template = ChatTemplate("{{ messages[0].value | tojson }}", model="m")
    rendered = await template.render(messages=[{"value": value}])
    assert json.loads(rendered) == value
    await template.close()


async def test_half_a_surrogate_pair_in_a_call_breaks_no_template() -> None:
    template = ChatTemplate("{{ messages[0] }}", model="m")
    assert await template.render(messages=["a\ud83db"]) == "a?b"
    await template.close()


async def test_generation_blocks_are_read_as_text() -> None:
    template = ChatTemplate("{% generation %}{{ messages[0] }}{% endgeneration %}", model="m")
    assert await template.render(messages=["hi"]) == "hi"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", '{"b": "é", "a": [1]}'),
        ("ensure_ascii=true", '{"b": "\\u00e9", "a": [1]}'),
        ("separators=(',', ':'), sort_keys=true", '{"a":[1],"b":"é"}'),
        ("indent=1", '{\n "b": "é",\n "a": [\n  1\n ]\n}'),
    ],
)
def test_json_is_written_as_transformers_lets_templates_do_it(arguments: str, text: str) -> None:
    rendering = Rendering(f"{{{{ value | tojson({arguments}) }}}}")
    (written,) = rendering({"value": {"b": "é", "a": [1]}})
    assert written.decode() == text
