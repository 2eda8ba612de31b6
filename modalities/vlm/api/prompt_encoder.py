"""Conversations with pictures in them, as a model that sees takes them.

Owns the way from messages to a prompt: fetching what URLs name, the chat template, where pictures
stand in what it made, and the ids of the positions that they fill. A conversation is encoded as one
text, in which each run of picture positions is one token that no caller can spell. Knows nothing of
HTTP; torch and transformers are not needed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from triptych.core.config import Config
from triptych.core.errors import InvalidRequest, PayloadTooLarge, RequestError
from triptych.core.media.fetch import MediaFetcher
from triptych.core.prompt_content import PictureSpan, PromptPicture, digest_of_tenant, picture_ids
from triptych.core.text.threads import on_text_thread
from triptych.core.transport.codec import MAX_MESSAGE_BYTES
from triptych.core.weights.resolve import ResolvedModel, opening
from triptych.modalities.llm.api.multimodal import PICTURE, ChatPrompt, PictureSource, pictures_of
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.vlm.api.facts import ask_facts
from triptych.modalities.vlm.api.preparation import PictureProcessorCache, PooledPreparation
from triptych.modalities.vlm.prepared import PreparedPicture, VisionFacts

RUN = "\uf8fe"
"""Stands for one run of picture positions in a rendered conversation."""
_COARSE_PIXELS = 512 * 512  # OpenAI's
_PROBE = "probe"


@dataclass(frozen=True, slots=True)
class _Takes:
    """In which forms a chat template takes a message's content."""

    parts: bool
    strings: bool


class VisionPromptEncoder:
    """Implements `modalities.llm.api.multimodal.MultimodalEncoder` for `text`, one model that sees.

    `placeholder` is what its chat template puts for a picture. Pictures of one conversation take
    `max_bytes` together, as the model takes them.
    """

    def __init__(
        self,
        text: TextModel,
        lens: PictureProcessorCache,
        fetcher: MediaFetcher,
        config: Config,
        *,
        placeholder: str,
        max_bytes: int = sys.maxsize,
    ) -> None:
        self.text = text
        self._lens = lens
        self._fetcher = fetcher
        self._options = config.vision
        self._placeholder = placeholder
        self._max_bytes = max_bytes
        self._run_id = text.tokenizer.token_to_id(RUN)
        self._takes: _Takes | None = None

    @classmethod
    def open(
        cls,
        model: ResolvedModel,
        facts: VisionFacts,
        lens: PictureProcessorCache,
        config: Config,
        *,
        max_bytes: int = sys.maxsize,
    ) -> VisionPromptEncoder:
        """Raises as `TextModel.open` does."""
        text = TextModel.open(
            model, config.models, text_config=facts.text, specials=(facts.placeholder, RUN)
        )
        fetcher = MediaFetcher.from_options(config.server)
        return cls(text, lens, fetcher, config, placeholder=facts.placeholder, max_bytes=max_bytes)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tenant: str = "", **template_kwargs: Any
    ) -> ChatPrompt:
        """A conversation with pictures in it; see `llm.api.multimodal.MultimodalEncoder`."""
        sources = list(pictures_of(messages))
        if len(sources) > self._options.max_pictures:
            raise InvalidRequest(
                f"A chat holds at most {self._options.max_pictures} pictures here, not"
                f" {len(sources)}.",
                param="messages",
            )
        looks = [asyncio.create_task(self._look(source, tenant)) for source in sources]
        try:
            pictures = await asyncio.gather(*looks)
        except RequestError as error:
            error.param = "messages"
            raise
        finally:
            for look in looks:
                look.cancel()
        self._check_size(pictures)
        return await self._encode(messages, pictures, template_kwargs)

    def _check_size(self, pictures: Sequence[PreparedPicture]) -> None:
        num_bytes = sum(picture.num_bytes for picture in pictures)
        if num_bytes > self._max_bytes:
            raise PayloadTooLarge(
                f"The {len(pictures)} pictures of this chat take {num_bytes / 2**20:.0f} MiB as the"
                f" model takes them; {self._max_bytes / 2**20:.0f} MiB may be sent with a request."
                ' Show fewer of them, or smaller ones ("detail": "low").',
                param="messages",
            )

    async def _look(self, source: PictureSource, tenant: str) -> PreparedPicture:
        file = source.file or await self._fetcher.fetch(source.url)
        most = self._options.max_picture_pixels
        max_pixels = min(most, _COARSE_PIXELS) if source.is_coarse else most
        picture = await self._lens.look(
            file, model=self.text.name, max_pixels=max_pixels, tenant=tenant
        )
        digest = digest_of_tenant(picture.digest, tenant)
        return msgspec.structs.replace(picture, digest=digest)

    async def _encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        pictures: Sequence[PreparedPicture],
        template_kwargs: Mapping[str, Any],
    ) -> ChatPrompt:
        plain = [_without_sources(message) for message in messages]
        escaped = await self.text.escape(plain)
        takes = self._takes = self._takes or await self._find_out()
        shown = [self._shown(message, takes) for message in escaped]
        pieces = (await self.text.render(shown, **template_kwargs)).split(self._placeholder)
        if len(pieces) - 1 != len(pictures):
            raise InvalidRequest(
                f"The chat template of {self.text.name} shows {len(pieces) - 1} of"
                f" {len(pictures)} pictures.",
                param="messages",
            )
        spelled = [*map(_spell, pictures), ""]
        rendered = "".join(text for pair in zip(pieces, spelled, strict=True) for text in pair)
        ids = await self.text.encode_rendered(rendered, has_stand_ins=escaped != plain)
        return await on_text_thread(len(ids), self._fill, ids, pictures)

    def _fill(self, ids: Sequence[int], pictures: Sequence[PreparedPicture]) -> ChatPrompt:
        """Put the pictures' own ids where their runs are."""
        runs = iter(
            (index, length)
            for index, picture in enumerate(pictures)
            for length in picture.spelling
            if isinstance(length, int)
        )
        streams = [iter(picture_ids(one.digest, one.num_features)) for one in pictures]
        filled: list[int] = []
        places: list[list[tuple[int, int]]] = [[] for _ in pictures]
        for token_id in ids:
            if token_id != self._run_id:
                filled.append(token_id)
                continue
            index, length = next(runs)
            places[index].append((len(filled), length))
            filled += islice(streams[index], length)
        assert next(runs, None) is None, "every run is in the prompt"
        return ChatPrompt(tuple(filled), tuple(map(_picture, pictures, places)))

    def _shown(self, message: Mapping[str, Any], takes: _Takes) -> dict[str, Any]:
        """A message in the form that the template takes: as parts, or as one string."""
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        has_picture = any(part["type"] == PICTURE for part in parts)
        if takes.parts if has_picture else not takes.strings:
            return {**message, "content": parts}
        words = (self._placeholder if part["type"] == PICTURE else part["text"] for part in parts)
        return {**message, "content": "".join(words)}

    async def _find_out(self) -> _Takes:
        """Asked of the template itself, when the first conversation comes."""
        picture = [{"type": PICTURE}, {"type": "text", "text": _PROBE}]
        return _Takes(
            parts=(await self._probe(picture)).count(self._placeholder) == 1,
            strings=_PROBE in await self._probe(_PROBE),
        )

    async def _probe(self, content: Any) -> str:
        try:
            return await self.text.render([{"role": "user", "content": content}])
        except InvalidRequest:  # a template that takes no such content
            return ""


def open_encoders(
    models: Sequence[ResolvedModel], config: Config, ending: AsyncExitStack
) -> dict[str, VisionPromptEncoder]:
    """What encodes prompts of each model, by name, with one pool of children for all pictures.

    `ending` closes the pool. Raises `WeightsError` where a model's folder is not fit.
    """
    if not models:
        return {}
    facts = ask_facts([model.folder for model in models])
    prepare = PooledPreparation(models, config)
    ending.push_async_callback(prepare.close)
    lens = PictureProcessorCache.from_config(prepare, config)
    return {
        model.name: opening(
            model, VisionPromptEncoder.open, known, lens, config, max_bytes=MAX_MESSAGE_BYTES
        )
        for model, known in zip(models, facts, strict=True)
    }


def _without_sources(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a template may see it: of a picture, only that it is one."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = [
            {"type": PICTURE}
            if part.get("type") == PICTURE
            else {"type": "text", "text": str(part.get("text", ""))}
            for part in content
        ]
        return {**message, "content": parts}
    return {**message, "content": content if content is not None else ""}


def _spell(picture: PreparedPicture) -> str:
    return "".join(RUN if isinstance(part, int) else part for part in picture.spelling)


def _picture(picture: PreparedPicture, runs: Sequence[tuple[int, int]]) -> PromptPicture:
    span = PictureSpan(digest=picture.digest, runs=tuple(runs), grid=picture.grid)
    return PromptPicture(span=span, inputs=picture.inputs)
