"""Encodes conversations with images as prompts of a vision model.

Owns the way from messages to a prompt: fetching URLs, the chat template, locating the images in the
rendered text, and the ids of the positions that they fill:

parts of messages -> the rendered template, with a placeholder for each image
                      -> the model's separators, and one token (`RUN`) for each run of positions
                      -> ids, with content ids in place of that token

A conversation is encoded as one text, since tokens depend on their neighbors; no caller can spell
the placeholder or that token. Knows nothing of HTTP; needs neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

import msgspec

from triptych.core.engine_api.prompt_content import (
    ContentSpan,
    PromptContent,
    content_ids,
    tenant_digest,
)
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import InvalidRequest, PayloadTooLarge, RequestError
from triptych.core.media.fetch import MediaFetcher
from triptych.core.options.config import Config
from triptych.core.options.declaration import Role
from triptych.core.text.threads import on_text_thread
from triptych.core.transport.messages import MAX_MESSAGE_BYTES
from triptych.core.weights.resolve import ResolvedModel, open_resolved
from triptych.modalities.llm.api.multimodal import ImageSource, Message, images_of
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.modality import ApiPart, ApiSetup, OpenedModel
from triptych.modalities.vlm.api.preparation import (
    ImageProcessorCache,
    PooledPreparation,
    load_facts,
)
from triptych.modalities.vlm.prepared import PreparedImage, VisionFacts

RUN = "\uf8fe"
"""A character that represents one run of image positions in a rendered conversation."""
_COARSE_PIXELS = 512 * 512  # OpenAI's
_IMAGE_PART = {"type": "image"}
"""An image in the form that chat templates expect."""
_PROBE = "probe"


class VisionPromptEncoder:
    """Implements `modalities.llm.api.multimodal.PromptEncoder` for `text`, one vision model.

    `placeholder` is the chat template's mark for an image. The inputs of a conversation's images
    may take `max_bytes` in total.
    """

    def __init__(
        self,
        text: TextModel,
        images: ImageProcessorCache,
        config: Config,
        *,
        placeholder: str,
        max_bytes: int = sys.maxsize,
    ) -> None:
        self.text = text
        self._images = images
        self._fetcher = MediaFetcher.from_options(config.server)
        self._options = config.vision
        self._placeholder = placeholder
        self._max_bytes = max_bytes
        self._run_id = text.tokenizer.token_to_id(RUN)
        self._forms: tuple[bool, bool] | None = None

    @classmethod
    def open(
        cls,
        model: ResolvedModel,
        facts: VisionFacts,
        images: ImageProcessorCache,
        config: Config,
        *,
        max_bytes: int = sys.maxsize,
    ) -> VisionPromptEncoder:
        """Open a model's encoder. Raises the errors of `TextModel.open`."""
        specials = (facts.placeholder, RUN)
        text = TextModel.open(model, config.models, text_config=facts.text, specials=specials)
        return cls(text, images, config, placeholder=facts.placeholder, max_bytes=max_bytes)

    async def encode_messages(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tenant: str = "",
        **template_kwargs: Any,
    ) -> TokenRequest:
        """Encode a conversation with images; see `llm.api.multimodal.PromptEncoder`."""
        images = await self._prepare(images_of(messages), tenant)
        self._check_size(images)
        given = [messages, list(tools)]
        escaped, tools = await self.text.escape(given)
        forms = self._forms = self._forms or await self._find_forms()
        shown = [self._to_template(message, *forms) for message in escaped]
        rendered = await self.text.render(shown, tools=tools, **template_kwargs)
        texts = rendered.split(self._placeholder)
        if len(texts) - 1 != len(images):
            raise InvalidRequest(
                f"The chat template of {self.text.name} shows {len(texts) - 1} of"
                f" {len(images)} images.",
                param="messages",
            )
        spelled = [
            "".join(RUN if isinstance(part, int) else part for part in image.spelling)
            for image in images
        ]
        rendered = "".join(chain.from_iterable(zip(texts, [*spelled, ""], strict=True)))
        ids = await self.text.encode_rendered(rendered, has_stand_ins=[escaped, tools] != given)
        return await on_text_thread(len(ids), self._fill, ids, images, tenant)

    async def _prepare(
        self, sources: Sequence[ImageSource], tenant: str
    ) -> Sequence[PreparedImage]:
        """Fetch and prepare the images, in order."""
        if len(sources) > self._options.max_images:
            raise InvalidRequest(
                f"A chat may hold at most {self._options.max_images} images, not {len(sources)}.",
                param="messages",
            )
        tasks = [asyncio.create_task(self._prepare_one(source, tenant)) for source in sources]
        try:
            return await asyncio.gather(*tasks)
        except RequestError as error:
            error.param = "messages"
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _prepare_one(self, source: ImageSource, tenant: str) -> PreparedImage:
        file = source.file or await self._fetcher.fetch(source.url)
        most = self._options.max_input_image_pixels
        image = await self._images.prepared(
            file,
            model=self.text.name,
            max_pixels=min(most, _COARSE_PIXELS) if source.is_coarse else most,
            tenant=tenant,
        )
        return msgspec.structs.replace(image, digest=tenant_digest(image.digest, tenant))

    def _check_size(self, images: Sequence[PreparedImage]) -> None:
        num_bytes = sum(image.num_bytes for image in images)
        if num_bytes > self._max_bytes:
            raise PayloadTooLarge(
                f"The {len(images)} images of this chat take {num_bytes / 2**20:.0f} MiB of model"
                f" input; the limit of a request is {self._max_bytes / 2**20:.0f} MiB."
                ' Send fewer images, or smaller ones ("detail": "low").',
                param="messages",
            )

    def _fill(
        self, ids: Sequence[int], images: Sequence[PreparedImage], tenant: str
    ) -> TokenRequest:
        """Replace the run tokens by the images' content ids."""
        runs = iter(
            (index, length)
            for index, image in enumerate(images)
            for length in image.spelling
            if isinstance(length, int)
        )
        streams = [iter(content_ids(one.digest, one.num_features)) for one in images]
        filled: list[int] = []
        places: list[list[tuple[int, int]]] = [[] for _ in images]
        for token_id in ids:
            if token_id != self._run_id:
                filled.append(token_id)
                continue
            index, length = next(runs)
            places[index].append((len(filled), length))
            filled += islice(streams[index], length)
        assert next(runs, None) is None, "every run is in the prompt"
        contents = (
            PromptContent(
                span=ContentSpan(digest=one.digest, runs=tuple(runs), grid=one.grid),
                inputs=one.inputs,
            )
            for one, runs in zip(images, places, strict=True)
        )
        return TokenRequest(prompt_ids=tuple(filled), contents=tuple(contents), tenant=tenant)

    def _to_template(
        self, message: Message, takes_parts: bool, takes_strings: bool
    ) -> dict[str, Any]:
        """Convert a message to the template's form: parts, or one string."""
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else content
        has_image = not all(isinstance(part, str) for part in parts)
        if takes_parts if has_image else not takes_strings:
            shown = [
                {"type": "text", "text": part} if isinstance(part, str) else _IMAGE_PART
                for part in parts
            ]
            return {**message, "content": shown}
        words = (part if isinstance(part, str) else self._placeholder for part in parts)
        return {**message, "content": "".join(words)}

    async def _find_forms(self) -> tuple[bool, bool]:
        """Whether the template supports parts with images, and whether strings: renders both."""
        image = [_IMAGE_PART, {"type": "text", "text": _PROBE}]
        shown = [await self._probe(content) for content in (image, _PROBE)]
        return shown[0].count(self._placeholder) == 1, _PROBE in shown[1]

    async def _probe(self, content: Any) -> str:
        try:
            return await self.text.render([{"role": "user", "content": content}])
        except InvalidRequest:  # the template does not support this content
            return ""


def open_api(setup: ApiSetup) -> ApiPart:
    """Register the prompt encoders of chat with images; adds no routes.

    All models share one pool of child processes. Raises `WeightsError` for an unfit folder.
    """
    encoders = _Encoders(setup.prompt_encoders, setup.config)
    setup.exit_stack.push_async_callback(encoders.close)
    if setup.models["vision"]:
        encoders.open(setup.models["vision"])
    return ApiPart(open_model=encoders.open_late, drop_model=encoders.drop)


class _Encoders:
    """The prompt encoders by model, and the child processes that prepare their images."""

    def __init__(self, encoders: dict[str, VisionPromptEncoder], config: Config) -> None:
        self._encoders = encoders
        self._config = config
        self._pools: dict[str, PooledPreparation] = {}

    def open(self, models: Sequence[ResolvedModel]) -> None:
        """Open the encoders of models that share one pool. Raises `WeightsError`."""
        config = self._config
        facts = load_facts(models, config.models.cache_dir)
        prepare = self._pools[models[0].name] = PooledPreparation(models, config)
        images = ImageProcessorCache.from_config(prepare, config)
        for model, known in zip(models, facts, strict=True):
            self._encoders[model.name] = open_resolved(
                model, VisionPromptEncoder.open, known, images, config, max_bytes=MAX_MESSAGE_BYTES
            )

    def open_late(self, model: ResolvedModel, role: Role) -> OpenedModel | None:
        """Open a model that comes after the start, with a pool of its own.

        The routes of chat find its encoder once they have the model.
        """
        if role == "vision":
            self.open([model])
        return None

    async def drop(self, name: str) -> None:
        """Forget a model. The pool of the start stays for its other models."""
        self._encoders.pop(name, None)
        if name in self._pools and not self._is_shared(name):
            await self._pools.pop(name).close()

    def _is_shared(self, name: str) -> bool:
        return any(each in self._encoders for each in self._pools[name].names)

    async def close(self) -> None:
        """End the child processes."""
        for pool in self._pools.values():
            await pool.close()
