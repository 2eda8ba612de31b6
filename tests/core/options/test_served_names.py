"""The names of models on the command line, and over HTTP."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from support.http import ANSWER, FakeEngine, chat, in_process
from support.text_models import write_text_folder
from triptych.compose import build_app
from triptych.core.errors import ConfigError
from triptych.core.options.config import Config, ModelOptions
from triptych.core.options.served_names import ServedNames


@pytest.mark.parametrize(
    ("model", "served", "own", "aliases"),
    [
        ((), (), (), {}),
        (("m",), ("a",), ("a",), {}),
        (("m",), ("a", "b", "c"), ("a",), {"b": "a", "c": "a"}),
        (("m",), ("a", "b=a"), ("a",), {"b": "a"}),
        (("m", "n"), ("a", "b", "c=b", "d=a"), ("a", "b"), {"c": "b", "d": "a"}),
        (("m", "n"), ("c=n",), (), {"c": "n"}),
    ],
)
def test_names_after_those_of_the_models_are_aliases(
    model: tuple[str, ...],
    served: tuple[str, ...],
    own: tuple[str, ...],
    aliases: dict[str, str],
) -> None:
    names = ServedNames.read(ModelOptions(model=model, served_model_name=served))
    assert (names.own, names.aliases) == (own, aliases)


def test_an_alias_is_of_a_model() -> None:
    names = ServedNames.read(ModelOptions(model=("m",), served_model_name=("a", "b=c")))
    with pytest.raises(ConfigError, match="b=c"):
        names.check(["a"])


async def test_a_model_answers_to_all_of_its_names(tmp_path: Path) -> None:
    engine = FakeEngine()
    model = write_text_folder(tmp_path, max_position_embeddings=4096)
    names = ("tiny", "gpt-4o", "claude")
    config = Config(models=ModelOptions(model=("tiny",), served_model_name=names))
    app = build_app(config, (model,), engine)
    async with in_process(app) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == list(names)
        for name in names:
            assert (await client.get(f"/v1/models/{name}")).json()["id"] == name
            reply = await client.post("/v1/chat/completions", json=chat() | {"model": name})
            assert reply.json()["model"] == name
            assert reply.json()["choices"][0]["message"]["content"] == ANSWER
            await _check_other_routes(client, name)
        wrong = await client.post(
            "/v1/audio/speech", json={"model": "gpt-4o", "input": "hi", "voice": "a"}
        )
        assert wrong.json()["error"]["code"] == "wrong_model"
    await app.state.close()
    assert set(engine.models) == {"tiny"}, "the engine knows one name"


async def _check_other_routes(client: httpx.AsyncClient, name: str) -> None:
    done = await client.post("/v1/completions", json={"model": name, "prompt": "hi"})
    assert done.json()["model"] == name
    tokens = await client.post("/tokenize", json={"model": name, "prompt": "hi"})
    assert tokens.json()["count"] == 2


@pytest.mark.parametrize(
    "served", [("",), ("a", ""), ("a", "=a"), ("a", "b="), ("a", "b", "b"), ("a", "b=a", "b=c")]
)
def test_names_that_are_empty_or_given_twice_are_refused(served: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"empty|twice"):
        ServedNames.read(ModelOptions(model=("m",), served_model_name=served))
