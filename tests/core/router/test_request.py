"""What a router knows of the requests of each modality."""

from __future__ import annotations

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.router.request import RoutedRequest
from triptych.modalities.diffusion.wire import AdapterUse, ImageRequest
from triptych.modalities.embedding.wire import EmbedRequest

IDS = tuple(range(200))


def test_prompts_of_tenants_and_adapters_have_nothing_in_common() -> None:
    plain = RoutedRequest.of("m", TokenRequest(prompt_ids=IDS))
    assert plain.num_tokens == 200
    assert len(plain.keys) == 2
    assert not plain.adapter
    for other in (
        TokenRequest(prompt_ids=IDS, tenant="t"),
        TokenRequest(prompt_ids=IDS, adapter="a"),
    ):
        assert not set(RoutedRequest.of("m", other).keys) & set(plain.keys)
    assert RoutedRequest.of("m", TokenRequest(prompt_ids=IDS, adapter="a")).adapter


def test_images_differ_by_their_adapters() -> None:
    plain = RoutedRequest.of("m", ImageRequest(prompt="a cat"))
    assert plain == RoutedRequest("m")
    ink = ImageRequest(adapters=(AdapterUse("ink"),))
    ash = ImageRequest(adapters=(AdapterUse("ash"),))
    found = {RoutedRequest.of("m", each).adapter for each in (ink, ash)}
    assert len(found) == 2
    assert 0 not in found


def test_other_requests_are_their_model() -> None:
    assert RoutedRequest.of("m", EmbedRequest(texts=(IDS,))) == RoutedRequest("m")
