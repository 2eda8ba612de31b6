"""Images and questions from Python: load a vision model, pass images, ask.

Owns the `VisionPipeline` object: the same engine and text service as the server's, in this process.
"""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from PIL import Image

from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import ConfigError, InvalidRequest
from triptych.core.media.fetch import Fetched
from triptych.core.options.config import Config
from triptych.core.process.cli_io import read_file
from triptych.core.process.lazy import load
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.api.multimodal import ImageSource
from triptych.modalities.llm.api.pipeline import ChatPipeline
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.modality import CHAT
from triptych.modalities.modality import Modality, modality_of
from triptych.modalities.vlm.api.preparation import (
    LOCAL_IMAGES,
    ImageProcessorCache,
    InProcessPreparation,
    PooledPreparation,
    PrepareImage,
    probe_facts,
)
from triptych.modalities.vlm.api.prompt_encoder import VisionPromptEncoder
from triptych.modalities.vlm.configs.processor_files import needs_torch
from triptych.modalities.vlm.modality import VISION
from triptych.modalities.vlm.prepared import VisionFacts

ImageInput: TypeAlias = Image.Image | str | Path | bytes
"""An image: a PIL image, a file's path, a file's contents, or a URL."""

_URLS = ("data:", "http://", "https://")


class VisionChatPipeline(ChatPipeline):
    """A chat model in this process, with images if the model supports vision.

    A message's content may hold parts `{"type": "image", "image": IMAGE}` among those of text.
    """

    _modalities: ClassVar[tuple[Modality, ...]] = (VISION, CHAT)

    @classmethod
    def _open_service(
        cls, resolved: ResolvedModel, config: Config
    ) -> Callable[[EngineClient], LlmService]:
        if not _has_vision(resolved):
            return super()._open_service(resolved, config)
        prepare, facts = _preparation(resolved, config)
        images = ImageProcessorCache.from_config(prepare, config)
        encoder = VisionPromptEncoder.open(resolved, facts, images, config)

        def make(client: EngineClient) -> LlmService:
            service = LlmService.from_config(
                config, [encoder.text], client, encoders={resolved.name: encoder}
            )
            if isinstance(prepare, PooledPreparation):
                service.at_close(prepare.close)
            return service

        return make

    def _part(self, part: Any) -> str | ImageSource:
        match part:
            case {"type": "image_url"}:
                url = part.get("image_url")
                return image_source(url.get("url") if isinstance(url, Mapping) else None)
            case {"type": "image"}:
                return image_source(part.get("image"))
        return super()._part(part)


class VisionPipeline(VisionChatPipeline):
    """A vision model, in this process.

        with VisionPipeline.from_pretrained() as see:
            print(see("cat.png", "What is this?"))
            for piece in see.stream(["a.png", "b.png"], "What differs?"):
                print(piece, end="", flush=True)

    A call takes an image or several and a question, or else a conversation as `ChatPipeline` does,
    with images in it. Keyword arguments are those of `ChatPipeline`.
    """

    @classmethod
    def _default(cls) -> str:
        return VISION.default

    @classmethod
    def _open_service(
        cls, resolved: ResolvedModel, config: Config
    ) -> Callable[[EngineClient], LlmService]:
        if not _has_vision(resolved):
            raise ConfigError(f"{resolved.name} has no vision encoder: name a vision model.")
        return super()._open_service(resolved, config)

    def __call__(self, conversation: Any, question: str = "", **options: Any) -> Any:
        """Answer a question about images; without one, answer one or more conversations."""
        return super().__call__(_as_conversation(conversation, question), **options)

    async def acall(self, conversation: Any, question: str = "", **options: Any) -> Any:
        """Async twin of calling the pipeline."""
        return await super().acall(_as_conversation(conversation, question), **options)

    def stream(self, conversation: Any, question: str = "", **options: Any) -> Iterator[str]:
        """Answer piece by piece. Leaving the loop early cancels the rest."""
        return super().stream(_as_conversation(conversation, question), **options)

    def astream(
        self, conversation: Any, question: str = "", **options: Any
    ) -> AsyncGenerator[str, None]:
        """Async twin of `stream`."""
        return super().astream(_as_conversation(conversation, question), **options)


def _preparation(resolved: ResolvedModel, config: Config) -> tuple[PrepareImage, VisionFacts]:
    """The preparation of images: in this process, or where the processor finds its library."""
    if needs_torch(Path(resolved.folder)):
        (facts,) = probe_facts([resolved.folder])  # before children run that an error would leave
        return PooledPreparation([resolved], config, limits=LOCAL_IMAGES, num_children=1), facts
    facts = load("triptych.modalities.vlm.processing.probe:read_facts")(resolved.folder)
    return InProcessPreparation(resolved), facts


def _has_vision(resolved: ResolvedModel) -> bool:
    return modality_of(resolved, (VISION, CHAT)) is VISION


def _as_conversation(images: Any, question: str) -> Any:
    """The conversation of a question about images; without a question, `images` is one already."""
    if not question:
        return images
    several = images if isinstance(images, list | tuple) else [images]
    parts = [{"type": "image", "image": image} for image in several]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def image_source(image: ImageInput | None) -> ImageSource:
    """The source of an image. Raises `ConfigError` for a file that cannot be read."""
    if isinstance(image, bytes):
        return ImageSource(file=Fetched(image, ""))
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, "png")
        return ImageSource(file=Fetched(file.getvalue(), ""))
    if isinstance(image, str) and image.lower().startswith(_URLS):
        return ImageSource(image)
    if not isinstance(image, str | Path):
        raise InvalidRequest(
            "An image must be a PIL image, a path, bytes or a URL.", param="messages"
        )
    return ImageSource(file=Fetched(read_file(image, "image"), ""))
