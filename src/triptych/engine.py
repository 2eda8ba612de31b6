"""Several models on one engine from Python.

Owns the `Engine` object: models of any kind on one timeline and one memory ledger in this process,
of which pipelines are views. Knows no modality by itself: the registry lists them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Self

from triptych.core.engine_api.reports import ModelStatus
from triptych.core.errors import ConfigError, UnknownModel
from triptych.core.options.relevance import check_in_process
from triptych.core.options.table import resolve_with_sources
from triptych.core.process.lazy import load
from triptych.core.weights.progress import RichProgress, SilentProgress
from triptych.modalities.host import EngineHost, config_in_process, read_keywords
from triptych.modalities.modality import modality_of
from triptych.modalities.registry import MODALITIES, resolve_models

if TYPE_CHECKING:
    from triptych.core.options.declaration import Role
    from triptych.core.options.pipeline_config import PipelineConfig
    from triptych.core.options.table import Resolved
    from triptych.core.weights.progress import Progress
    from triptych.core.weights.resolve import ResolvedModel
    from triptych.modalities.asr.api.pipeline import TranscriptionPipeline
    from triptych.modalities.diffusion.api.pipeline import ImagePipeline
    from triptych.modalities.embedding.api.pipeline import EmbeddingPipeline
    from triptych.modalities.llm.api.pipeline import ChatPipeline
    from triptych.modalities.pipeline import Pipeline
    from triptych.modalities.talk.speaking.conversation import SpokenConversation
    from triptych.modalities.tts.api.pipeline import SpeechPipeline
    from triptych.modalities.vlm.api.pipeline import VisionPipeline


def _any_kinds(_: Collection[Role]) -> None:
    """Accept the kinds of models, whichever they are."""


class Engine:
    """Models of several kinds on one engine in this process.

        with Engine(["embedded", "triptych-voice", "triptych-image"]) as engine:
            answer = engine.chat("Describe a lighthouse in one sentence.")
            engine.speak(answer.text).save("lighthouse.wav")
            engine.imagine("a lighthouse at night", seed=1)[0].save("lighthouse.png")

    `models` are given as to `triptych serve --model`; none are its default models. The other
    keywords are its options, except those of the server itself. All models share one memory budget
    and one timeline: a step of one never waits for a whole answer of another.

    `chat`, `see`, `embed`, `speak`, `transcribe` and `imagine` are pipelines of the first model of
    their kind, with their streams and their async twins; `pipeline` gives that of a model by name.
    `talk` opens a spoken conversation.
    """

    def __init__(
        self, models: str | Sequence[str] = (), *, progress: bool = True, **options: Any
    ) -> None:
        """Load the models, or with load="first-use" only start the engine.

        Raises errors of `core.errors.SetupError`, as `Pipeline.from_pretrained` does.
        """
        named = [models] if isinstance(models, str) else list(models)
        self._start(read_keywords(named, options), RichProgress() if progress else SilentProgress())

    @classmethod
    def from_config(cls, config: PipelineConfig, *, progress: bool = True) -> Self:
        """Load the models of a configuration."""
        engine = cls.__new__(cls)
        engine._start(config.resolved, RichProgress() if progress else SilentProgress())
        return engine

    @classmethod
    def from_arguments(
        cls, args: argparse.Namespace, check_kinds: Callable[[Collection[Role]], None] = _any_kinds
    ) -> Self:
        """Load the models of a command. `check_kinds` may refuse their kinds before that."""
        engine = cls.__new__(cls)
        engine._start(resolve_with_sources(args), RichProgress(), check_kinds)
        return engine

    def _start(
        self,
        options: Resolved,
        progress: Progress,
        check_kinds: Callable[[Collection[Role]], None] = _any_kinds,
    ) -> None:
        check_in_process(options)  # before anything is fetched
        found = resolve_models(options, progress)
        config = config_in_process(options, num_models=len(found))
        self._roles: dict[str, Role] = {
            model.name: modality_of(model, MODALITIES).role for model in found
        }
        check_kinds(self._roles.values())
        classes = {model.name: _pipeline_class(model) for model in found}
        hosted = [classes[model.name].hosted(model) for model in found]
        self._host = EngineHost.start(hosted, config)
        self._pipelines: dict[str, Pipeline[Any]] = {
            name: kind(name, self._host, owns_host=False) for name, kind in classes.items()
        }

    @property
    def models(self) -> tuple[ModelStatus, ...]:
        """The state of each model, as of the engine's last heartbeat."""
        return self._host.client.status().models

    def pipeline(self, model: str) -> Any:
        """The pipeline of the model with this name. Raises `UnknownModel`."""
        if model not in self._pipelines:
            raise UnknownModel.among(self._pipelines, model)
        return self._pipelines[model]

    def load(self, model: str) -> None:
        """Load a model that is not in memory, and wait until it is ready."""
        self.pipeline(model)
        self._host.loop.run(self._host.client.load(model))

    def unload(self, model: str) -> None:
        """Unload a model once no call needs it; the next call loads it again."""
        self.pipeline(model)
        self._host.loop.run(self._host.client.unload(model))

    @property
    def chat(self) -> ChatPipeline:
        """The first chat model, or the first vision model where there is no other."""
        pipeline: ChatPipeline = self._first("chat", "vision")
        return pipeline

    @property
    def complete(self) -> Callable[..., Any]:
        """Continue texts or token ids with the chat model: `ChatPipeline.complete`."""
        return self.chat.complete

    @property
    def see(self) -> VisionPipeline:
        """The first vision model."""
        pipeline: VisionPipeline = self._first("vision")
        return pipeline

    @property
    def embed(self) -> EmbeddingPipeline:
        """The first embedding model."""
        pipeline: EmbeddingPipeline = self._first("embedding")
        return pipeline

    @property
    def score(self) -> Callable[..., list[float]]:
        """Compare documents with a query: `EmbeddingPipeline.score`."""
        return self.embed.score

    @property
    def speak(self) -> SpeechPipeline:
        """The first speech model."""
        pipeline: SpeechPipeline = self._first("speech")
        return pipeline

    @property
    def transcribe(self) -> TranscriptionPipeline:
        """The first recognizer of speech."""
        pipeline: TranscriptionPipeline = self._first("asr")
        return pipeline

    @property
    def imagine(self) -> ImagePipeline:
        """The first image model."""
        pipeline: ImagePipeline = self._first("image")
        return pipeline

    def talk(
        self,
        *,
        system: str | None = None,
        voice: str = "",
        speed: float = 1.0,
        language: str = "",
        **options: Any,
    ) -> SpokenConversation:
        """Open a conversation that is spoken, with the first models of chat and speech.

        `voice`, `speed` and `language` are those of the sound, `options` those of a chat call.
        Without them, answers are short: `system` asks for one or two sentences, and `max_tokens`
        is 200 if the model neither reasons nor has tools. Sound is heard by the first recognizer.
        Raises `RequestError`s for options of speech.
        """
        from triptych.modalities.llm.api.audio_fields import MAX_SPOKEN_TOKENS, SPOKEN_INSTRUCTIONS
        from triptych.modalities.talk.speaking.conversation import SpokenConversation, TalkModels
        from triptych.modalities.tts.api.service import SpeechCall

        speaking = self.speak.name
        models = TalkModels(
            loop=self._host.loop,
            chat=self.chat,
            recognizer=self.transcribe if "asr" in self._roles.values() else None,
            speech=self._host.services[speaking],
            voice_model=speaking,
        )
        call = SpeechCall(model=speaking, text="", voice=voice, speed=speed, language=language)
        models.speech.check(call)
        chat = self._host.services[self.chat.name].model(self.chat.name)
        if system is None:
            system = SPOKEN_INSTRUCTIONS if chat.traits.takes_system else ""
        if not options.get("tools") and not chat.answers.has_reasoning:
            options = {"max_tokens": MAX_SPOKEN_TOKENS, **options}
        return SpokenConversation(models, system=system, call=call, options=options)

    def close(self) -> None:
        """End the engine and release its memory. A second call does nothing."""
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _first(self, *roles: Role) -> Any:
        for role in roles:
            for name, own in self._roles.items():
                if own == role:
                    return self._pipelines[name]
        raise ConfigError(
            f"This engine has no model of the kind {roles[0]!r}; it has {', '.join(self._roles)}."
        )


def _pipeline_class(model: ResolvedModel) -> type[Pipeline[Any]]:
    """The pipeline of a model's kind."""
    name, module = next(iter(modality_of(model, MODALITIES).pipelines.items()))
    kind: type[Pipeline[Any]] = load(f"{module}:{name}")
    return kind
