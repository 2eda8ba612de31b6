"""Loads a vision model onto the device: memory, weights, caches, runner, scheduler.

Owns the order of these. Knows no architecture: the blueprint does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from triptych.core.engine_api.plan import Runner
from triptych.core.errors import ConfigError
from triptych.core.kv.parts import PartKind
from triptych.core.kv.transfer.messages import FEATURES, PageFormat
from triptych.core.options.pipeline_plan import PipelinePlan
from triptych.core.runtime.engine.model_memory import ModelMemory
from triptych.core.runtime.engine.text_head import TextHead, TokenSampler
from triptych.core.runtime.engine.token_runner import TokenRunner
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvLayout
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.grouped import open_checkpoint
from triptych.core.runtime.tensors.whole import is_quantized
from triptych.modalities.llm.engine.adapter_room import make_room
from triptych.modalities.llm.engine.follower import Follower, ignore_progress
from triptych.modalities.llm.engine.loader import LlmLoader
from triptych.modalities.vlm.engine.blueprint import VisionBlueprint, is_native
from triptych.modalities.vlm.engine.encoder import FeatureCache, open_cache
from triptych.modalities.vlm.engine.fallback import FallbackVisionBlueprint
from triptych.modalities.vlm.engine.feature_memory import FeaturePages, IncomingFeatures
from triptych.modalities.vlm.engine.head import VisionHead
from triptych.modalities.vlm.engine.memory_check import SharedMemoryCheck
from triptych.modalities.vlm.engine.runner import VisionRunner, plan_message
from triptych.modalities.vlm.engine.step_features import (
    CachedFeatures,
    FollowingFeatures,
    LeadingFeatures,
    StepFeatures,
)
from triptych.modalities.vlm.engine.vision_model import SeeingDecoder, VisionTextModel
from triptych.modalities.vlm.plan import SharedPlan
from triptych.modalities.vlm.scheduling.fetching import FetchedFeatures
from triptych.modalities.vlm.scheduling.prompts import (
    VisionLimits,
    VisionResources,
    VisionScheduler,
)
from triptych.schedulers.base import LoadedModel
from triptych.schedulers.roles.pipeline_roles import open_client

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup
    from triptych.core.runtime.engine.ranks import Ranks

STEP_PATCHES = 8192
"""Patches of images that are encoded together; a larger image is encoded alone."""
RESERVED_PATCHES = 2 * STEP_PATCHES
"""Patches whose activation memory is reserved at load."""
_IMAGE_FEATURES = 1024
"""The expected number of an image's features, for sizing the cache."""
_CACHE_SHARE = 0.1  # of the ledger, at most

Blueprint = VisionBlueprint | FallbackVisionBlueprint
_FALLBACK = "triptych.modalities.vlm.engine.fallback:FallbackVisionBlueprint"


class VisionLoader(LlmLoader):
    """Implements `schedulers.base.ModelLoader`. Torch encodes images, several at once."""

    is_fixed_on_gpu: ClassVar[bool] = False
    sees_images: ClassVar[bool] = True

    def _load(self, report: Callable[[float], None]) -> LoadedModel:
        with open_checkpoint(self._resolved.folder) as checkpoint, ExitStack() as stack:
            memory = self._memory(stack)
            checkpoint.native = native = memory.native_kernels()
            blueprint: Blueprint = self._blueprint(checkpoint, memory, native)
            memory.num_ranks = self._num_ranks
            make_room(blueprint.text, self._config, self._device, self.name, sees=True)
            ranks = self._start_ranks(blueprint.text, stack)
            if ranks is not None:
                assert isinstance(blueprint, VisionBlueprint), "other models are not divided"
                blueprint.share_encoder(ranks.group)
            max_length = blueprint.text.max_length
            draft = self._draft(blueprint.text, stack)
            layout = draft.layout_of(self._reserve_model(memory, blueprint))
            cache_bytes = self._reserve_cache(memory, blueprint)
            features = open_cache(cache_bytes, self._config.cache.max_vision_cache_entries)
            graphs = self._graphs(memory, layout, max_length, blueprint.text.activation_bytes)
            draft.reserve(blueprint.text, layout.page_size)
            gives_back = self._has_room(blueprint)
            size = memory.reserve_cache(
                layout, max_length, gives_back=gives_back, drafts=self._may_draft(draft)
            )
            layout = size.layout_of(layout)
            shares = not blueprint.traits.whole_prompts
            self._reserve_tiers(memory, layout, size, shares=shares)
            memory.show()
            sampler: TokenSampler = self._sampler(
                blueprint.text.vocab_size, native, lossy=self._lossy_rules()
            )
            source = CachedFeatures(features, blueprint.dtype)
            if ranks is not None:
                ranks.send_capacity(size)
                sampler = ranks.leading_sampler(sampler)
                source = LeadingFeatures(features, blueprint.dtype, ranks.group)
            decoder, encoder = blueprint.build(report)
            draft.attach(decoder.text)
            tokens = self._runner(
                self._vision_head(blueprint, decoder, sampler, source),
                layout,
                size,
                max_length=max_length,
                native=native,
                graphs=graphs,
            )
            scheduler = VisionScheduler(
                **self._schedule(layout, size, max_length, shares=shares),
                vision=VisionResources(features, _limits(blueprint)),
            )
            scheduler.tokens.adapters = self._adapters(blueprint.text, stack)
            device, stream = self._device.torch, tokens.stream
            see = partial(
                VisionRunner, encoder=encoder, features=features, device=device, stream=stream
            )
            runner = self._vision_runner(draft.join(scheduler, tokens), see, blueprint, ranks)
            stack.callback(runner.close)
            self._exchange(scheduler, tokens.kv, blueprint.text, stack)
            if PipelinePlan.checked(self._config).fetches_features:
                stack.callback(self._fetch_features(scheduler, features, blueprint))
            return self._loaded(scheduler, runner, blueprint.text.vocab_size, stack, ranks)

    def _follower(
        self,
        checkpoint: Checkpoint,
        memory: ModelMemory,
        native: NativeKernels | None,
        group: RankGroup,
    ) -> Follower:
        """A follower rank. It receives features from rank 0, even if the encoder is divided."""
        from triptych.core.runtime.engine.rank_sampler import FollowingSampler

        blueprint: VisionBlueprint = self._blueprint(checkpoint, memory, native)
        blueprint.text.join(group, by_experts=self._config.device.enable_expert_parallel)
        encodes = blueprint.share_encoder(group)

        def build() -> TextHead:
            decoder = blueprint.build_decoder(ignore_progress)
            features = FollowingFeatures(group, blueprint.feature_layout, self._device.torch)
            return self._vision_head(blueprint, decoder, FollowingSampler(group), features)

        def open_runner(tokens: TokenRunner) -> Runner:
            if not encodes:
                return tokens
            encoder, unused = blueprint.build_encoder(), open_cache(0, 0)
            runner = VisionRunner(tokens, encoder, unused, self._device.torch, tokens.stream)
            runner.memory_check = self._memory_check(blueprint, group)
            return runner

        reserve = partial(self._reserve_model, memory, blueprint, encodes=encodes)
        return Follower(blueprint.text, reserve, build, open_runner, SharedPlan)

    def _vision_runner(
        self,
        tokens: Runner,
        see: Callable[[Runner], VisionRunner],
        blueprint: Blueprint,
        ranks: Ranks | None,
    ) -> Runner:
        """The runner of rank 0, or of the only process; `see` adds the encoder to one of tokens."""
        if ranks is None:
            return see(tokens)
        if not blueprint.shares_encoder:
            return see(ranks.leading_runner(tokens))
        shared = see(tokens)
        shared.memory_check = self._memory_check(blueprint, ranks.group)
        return ranks.leading_runner(shared, plan_message)

    def _memory_check(self, blueprint: Blueprint, group: RankGroup) -> SharedMemoryCheck:
        return SharedMemoryCheck(
            group=group,
            device=self._device,
            patch_bytes=blueprint.encoder_activation_bytes(1),
            reserved_patches=RESERVED_PATCHES,
        )

    def _blueprint(
        self, checkpoint: Checkpoint, memory: ModelMemory, native: NativeKernels | None
    ) -> Any:
        """The blueprint of decoder and encoder, before loading."""
        is_known = is_native(checkpoint.config)
        kind = self._kind(VisionBlueprint, _FALLBACK, native, is_known=is_known)
        takes_blocks = kind is VisionBlueprint or is_quantized(checkpoint)
        sizes = self._sizes(memory, checkpoint, native, takes_blocks=takes_blocks)
        blueprint = kind(checkpoint, **sizes)
        if kind is VisionBlueprint:
            blueprint.text.packing = memory.packing(native)
        return blueprint

    def _vision_head(
        self,
        blueprint: Blueprint,
        decoder: VisionTextModel,
        sampler: TokenSampler,
        features: StepFeatures,
    ) -> VisionHead:
        head = VisionHead(
            decoder,
            sampler,
            features,
            blueprint.traits,
            max_batch_size=self._config.schedule.max_batch_size,
            device=self._device.torch,
        )
        if isinstance(decoder, SeeingDecoder):
            head.adapter_rows = decoder.decoder.adapter_rows
        return head

    def _reserve_model(
        self, memory: ModelMemory, blueprint: Blueprint, *, encodes: bool = True
    ) -> KvLayout:
        """Reserve memory for weights and steps; returns the cache's layout."""
        options, num_rows = self._config.schedule, self._config.schedule.max_batch_size
        num_tokens = options.max_batch_input_tokens + num_rows
        if blueprint.family.whole_prompts:
            num_tokens = max(num_tokens, blueprint.text.max_length + num_rows)
        self._reserve_weights(memory, blueprint.text)
        activation_bytes = blueprint.text.activation_bytes(num_tokens, num_rows)
        if encodes:
            encoder_bytes = blueprint.encoder_bytes()
            memory.reserve("vision-weights", encoder_bytes, is_divided=blueprint.shares_encoder)
            encoding_bytes = blueprint.encoder_activation_bytes(RESERVED_PATCHES)
            activation_bytes = max(activation_bytes, encoding_bytes)
        memory.reserve("activations", activation_bytes)
        layout = blueprint.text.kv_layout(*memory.cache_format(blueprint.dtype))
        return layout

    def _has_room(self, blueprint: Blueprint) -> bool:
        """Whether a step's tokens hold what it may not cut: an image, or a whole prompt."""
        if not isinstance(blueprint, VisionBlueprint) or blueprint.traits.whole_prompts:
            return False
        return blueprint.longest_span <= self._config.schedule.max_batch_input_tokens

    def _reserve_cache(self, memory: ModelMemory, blueprint: Blueprint) -> int:
        """Reserve and return the bytes of the feature cache."""
        max_entries = self._config.cache.max_vision_cache_entries
        wanted = max(max_entries * _IMAGE_FEATURES, STEP_PATCHES) * blueprint.feature_bytes
        cache_bytes = min(wanted, int(_CACHE_SHARE * self._ledger.capacity_bytes))
        memory.reserve("vision-cache", cache_bytes, is_divided=False)
        return cache_bytes

    def _feature_format(self, blueprint: VisionBlueprint, memory: FeaturePages) -> PageFormat:
        """The page format on which two engines that exchange features must agree."""
        return PageFormat(
            content=FEATURES,
            weights=self._resolved.digest,
            layout=str(blueprint.feature_layout),
            order="",
            compute=f"{self._compute(blueprint)} {blueprint.kernels} {blueprint.scaling}",
            max_length=0,
            page_bytes=memory.page_bytes,
        )

    def _fetch_features(
        self, scheduler: VisionScheduler, features: FeatureCache, blueprint: Blueprint
    ) -> Callable[[], None]:
        """Fetch features from encoding engines; returns the closer. Raises `ConfigError`."""
        plan = PipelinePlan.checked(self._config)
        if not isinstance(blueprint, VisionBlueprint):
            raise ConfigError(no_separate_encoder(self.name, plan.features.flag))
        capacity_bytes, device = features.capacity_bytes, self._device.torch
        layout = blueprint.feature_layout
        memory = IncomingFeatures(features, layout, capacity_bytes, device)
        client = open_client(
            plan.features, self._feature_format(blueprint, memory), {PartKind.FULL: memory}
        )
        scheduler.image_exchange = FetchedFeatures(memory, client)
        return client.close


def _limits(blueprint: Blueprint) -> VisionLimits:
    traits = blueprint.traits
    return VisionLimits(
        max_step_patches=STEP_PATCHES,
        whole_spans=traits.whole_spans,
        whole_prompts=traits.whole_prompts,
    )


def no_separate_encoder(name: str, flag: str) -> str:
    """The reason why a model's encoder cannot run in a separate engine."""
    return (
        f"{flag}: {name} runs as a whole on transformers; leave the option out, or name a model of"
        " a family with native decoders."
    )
