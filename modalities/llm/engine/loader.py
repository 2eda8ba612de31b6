"""Loads one language model onto the device: memory, weights, cache, runner, scheduler.

Owns the order of these steps. Knows no architecture: blueprints do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from msgspec import structs

from triptych.core.engine_api.plan import Runner
from triptych.core.errors import ConfigError
from triptych.core.grammar.vocabulary import GrammarVocabulary
from triptych.core.kv.parts import PartKind
from triptych.core.kv.transfer.messages import PageFormat
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config
from triptych.core.options.pipeline_plan import PipelinePlan
from triptych.core.options.speculation import NGRAM
from triptych.core.options.tier_plan import TierPlan
from triptych.core.process.lazy import load
from triptych.core.runtime.decoders.causal_model import CausalModel
from triptych.core.runtime.decoders.families.table import is_native
from triptych.core.runtime.decoders.native import Blueprint, NativeBlueprint
from triptych.core.runtime.devices.device import Device, share_cores
from triptych.core.runtime.engine.adapter_store import AdapterStore
from triptych.core.runtime.engine.cache_size import CacheSize
from triptych.core.runtime.engine.loader import TokenLoader
from triptych.core.runtime.engine.model_memory import ModelMemory
from triptych.core.runtime.engine.page_memory import part_memories
from triptych.core.runtime.engine.text_head import TextHead, TokenSampler
from triptych.core.runtime.kernels.attention_backends import TRITON, choose_backend
from triptych.core.runtime.kernels.library_attention import gathered_bytes
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvCache, KvLayout, LatentShape
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.sampling.acceptance import LossyRules
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.grouped import open_checkpoint
from triptych.core.runtime.tensors.whole import is_quantized
from triptych.core.weights.resolve import ResolvedModel
from triptych.core.weights.text_alone import missing_package, text_alone
from triptych.modalities.llm.engine.adapter_room import make_room
from triptych.modalities.llm.engine.draft_loader import DraftLoader, NoDraftLoader
from triptych.modalities.llm.engine.drafting import open_draft_loader
from triptych.modalities.llm.engine.follower import Follower, ignore_progress
from triptych.modalities.llm.engine.host_memory import leave_on_host
from triptych.schedulers.base import LoadedModel
from triptych.schedulers.executors import Post
from triptych.schedulers.health import crash
from triptych.schedulers.roles.pipeline_roles import open_exchange
from triptych.schedulers.tokens.adapters import AdapterPool
from triptych.schedulers.tokens.grammar_worker import GrammarWorker
from triptych.schedulers.tokens.prompt_lookup import LookupRule
from triptych.schedulers.tokens.scheduler import TokenScheduler
from triptych.schedulers.tokens.stored_pages import TierSizes, open_tiers

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup
    from triptych.core.runtime.engine.ranks import Plans, Ranks

_log = logging.getLogger(__name__)
_FALLBACK = "triptych.modalities.llm.engine.fallback:FallbackBlueprint"


class LlmLoader(TokenLoader):
    """Implements `schedulers.base.ModelLoader` for text models."""

    is_fixed_on_gpu: ClassVar[bool] = True
    generates: ClassVar[bool] = True
    sees_images: ClassVar[bool] = False
    _host_bytes: Mapping[PartKind, int] = MappingProxyType({})  # for pages that leave the device

    def __init__(
        self, resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
    ) -> None:
        self._num_ranks = config.device.tensor_parallel_size
        super().__init__(resolved, config, device, ledger)
        if self._num_ranks > 1 and device.is_cpu:
            share_cores(config.device, self._num_ranks)

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the model; see `schedulers.base.ModelLoader.load`. Releases all on an error.

        Where the model's own context does not fit, and no --max-length is given, it is reduced.
        """
        return self._with_fitting_context(partial(self._load, report))

    def _load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the model with the context of the configuration."""
        if PipelinePlan.checked(self._config).encodes:
            raise ConfigError(f"--pipeline-role encode: {self.name} takes no images; name others.")
        with open_checkpoint(self._resolved.folder) as checkpoint, ExitStack() as stack:
            memory = self._memory(stack)
            memory.num_ranks = self._num_ranks
            checkpoint.native = native = memory.native_kernels()
            blueprint = self._blueprint(checkpoint, memory, native)
            if self.generates:
                make_room(blueprint, self._config, self._device, self.name)
            leave_on_host(blueprint, self._config, self._device, memory, self.name)
            ranks = self._start_ranks(blueprint, stack)
            layout = self._reserve(blueprint, memory)
            draft = self._draft(blueprint, stack)
            layout = draft.layout_of(layout)
            max_length = blueprint.max_length
            graphs = self._graphs(
                *(memory, layout, max_length, blueprint.activation_bytes),
                has_prompts=self._captures_prompts(blueprint, memory),
            )
            draft.reserve(blueprint, layout.page_size)
            drafts = self._may_draft(draft)
            size = memory.reserve_cache(layout, max_length, gives_back=True, drafts=drafts)
            layout = size.layout_of(layout)
            self._reserve_tiers(memory, layout, size)
            memory.show()
            sampler: TokenSampler = self._sampler(
                blueprint.vocab_size, native, lossy=self._lossy_rules()
            )
            if ranks is not None:
                ranks.send_capacity(size)
                sampler = ranks.leading_sampler(sampler)
            model = blueprint.build(checkpoint, report)
            draft.attach(model)
            runner = self._runner(
                self._head(model, sampler),
                layout,
                size,
                max_length=max_length,
                native=native,
                graphs=graphs,
            )
            stack.callback(runner.close)
            scheduler = TokenScheduler(**self._schedule(layout, size, max_length))
            scheduler.tokens.adapters = self._adapters(blueprint, stack)
            self._exchange(scheduler, runner.kv, blueprint, stack)
            whole: Runner = draft.join(scheduler, runner)
            whole = whole if ranks is None else ranks.leading_runner(whole)
            return self._loaded(
                scheduler,
                whole,
                blueprint.vocab_size,
                stack,
                ranks,
            )

    def follow(self, plans: Plans, group: RankGroup, ready: Callable[[], None]) -> None:
        """Implements `core.runtime.engine.ranks.RankLoader` for text models."""
        with open_checkpoint(self._resolved.folder) as checkpoint, ExitStack() as stack:
            memory = self._memory(stack)
            checkpoint.native = native = memory.native_kernels()
            follower = self._follower(checkpoint, memory, native, group)
            layout, size = follower.reserve(), plans.capacity(CacheSize)
            memory.reserve("kv", size.page_bytes(size.layout_of(layout), 1))
            tokens = self._runner(
                follower.build(),
                layout,
                size,
                max_length=follower.blueprint.max_length,
                native=native,
                graphs=None,
            )
            runner = follower.runner(tokens)
            ready()
            plans.run(runner.launch, follower.plans)

    def _follower(
        self,
        checkpoint: Checkpoint,
        memory: ModelMemory,
        native: NativeKernels | None,
        group: RankGroup,
    ) -> Follower:
        """A rank's part of the model."""
        from triptych.core.runtime.engine.rank_sampler import FollowingSampler

        blueprint = self._blueprint(checkpoint, memory, native)
        blueprint.join(group, by_experts=self._config.device.enable_expert_parallel)

        def build() -> TextHead:
            return self._head(blueprint.build(checkpoint, ignore_progress), FollowingSampler(group))

        return Follower(blueprint, partial(self._reserve, blueprint, memory), build)

    def _blueprint(
        self, checkpoint: Checkpoint, memory: ModelMemory, native: NativeKernels | None
    ) -> Any:
        """The model's blueprint, before loading."""
        config = text_alone(checkpoint.config)
        if package := missing_package(checkpoint.config):
            _log.warning("%s answers text alone: its encoders need %s", self.name, package)
        is_known = is_native(config, self._config.models.max_length)
        kind = self._kind(NativeBlueprint, _FALLBACK, native, is_known=is_known)
        is_ours = kind is NativeBlueprint
        takes_blocks = is_ours or is_quantized(checkpoint)
        blueprint = kind(
            config, **self._sizes(memory, checkpoint, native, takes_blocks=takes_blocks)
        )
        if is_ours:
            blueprint.is_deterministic = self._is_deterministic
            blueprint.packing = memory.packing(native)
        return blueprint

    def _start_ranks(self, blueprint: Any, stack: ExitStack) -> Ranks | None:
        """Start the other ranks, if any; `blueprint` becomes rank 0's part.

        Raises `ConfigError` for a model that cannot be divided.
        """
        by_experts = self._config.device.enable_expert_parallel
        if self._num_ranks == 1:
            if by_experts:
                raise ConfigError(
                    "--enable-expert-parallel: there is one rank; give --tensor-parallel-size, too,"
                    " or leave it out."
                )
            return None
        if not isinstance(blueprint, NativeBlueprint):
            raise ConfigError(
                f"--tensor-parallel-size {self._num_ranks}: {self.name} does not run on our decoder"
                " and is not divided; leave it out, or name a model of the decoder's families."
            )
        if self._is_deterministic and not self._device.is_cpu:
            raise ConfigError(
                "--enable-deterministic-inference: sums of several GPUs follow from the batch;"
                " leave it or --tensor-parallel-size out."
            )
        blueprint.check_divisible(self._num_ranks, by_experts=by_experts)
        ranks = self._ranks(self._num_ranks, stack)
        blueprint.join(ranks.group, by_experts=by_experts)
        return ranks

    def _captures_prompts(self, blueprint: Blueprint, memory: ModelMemory) -> bool:
        """Whether to capture steps with prompts. Raises `ConfigError` where that cannot be done."""
        is_wanted = self._config.device.device_graph_prompts
        is_native = isinstance(blueprint, NativeBlueprint)
        if is_wanted and (self._device.is_cpu or not is_native or not memory.captures):
            raise ConfigError(
                f"--device-graph-prompts: steps of {self.name} with prompts are not captured here;"
                " only those of models on the native decoder are, on one GPU. Leave it out."
            )
        return is_wanted

    def _reserve(self, blueprint: Blueprint, memory: ModelMemory) -> KvLayout:
        """Reserve memory for weights and steps; returns the shape of the cache."""
        num_rows = self._config.schedule.max_batch_size
        num_tokens = self._config.schedule.max_batch_input_tokens + num_rows
        self._reserve_weights(memory, blueprint)
        layout = blueprint.kv_layout(*memory.cache_format(blueprint.dtype))
        self._attention_backend = self._choose_backend(blueprint, layout)
        num_bytes = blueprint.activation_bytes(num_tokens, num_rows)
        if self._attention_backend != TRITON:
            shape = layout.widest
            num_bytes += gathered_bytes(
                *(shape.num_kv_heads, shape.head_dim), layout.dtype, blueprint.dtype
            )
        memory.reserve("activations", num_bytes)
        return layout

    def _may_draft(self, draft: DraftLoader | NoDraftLoader) -> bool:
        """Whether answers may have drafts: of their own text, or of what `draft` loads."""
        return self._lookup_rule() is not None or isinstance(draft, DraftLoader)

    def _reserve_weights(self, memory: ModelMemory, blueprint: Blueprint) -> None:
        """Reserve memory for weights, and for adapters that take none of their own."""
        memory.reserve("weights", blueprint.weight_bytes())
        if isinstance(blueprint, NativeBlueprint) and (room_bytes := blueprint.stacked_bytes):
            memory.reserve("adapters", room_bytes)

    def _reserve_tiers(
        self, memory: ModelMemory, layout: KvLayout, size: CacheSize, *, shares: bool = True
    ) -> None:
        """Reserve host memory for pages that leave the device, if they are kept.

        Raises `ConfigError` for a model that `shares` none.
        """
        plan = TierPlan.of(self._config)
        if plan is None:
            return
        if not shares:
            raise ConfigError(
                f"--kv-connector {plan.connector}: {self.name} computes each prompt as a whole and"
                " reuses no pages; leave the option out."
            )
        self._host_bytes = memory.reserve_host_tier(plan, layout, size)

    def _choose_backend(self, blueprint: Blueprint, layout: KvLayout) -> str:
        """The kernels of attention. Raises `ConfigError` for some that cannot serve the model."""
        wanted = self._config.device.attention_backend
        if not isinstance(blueprint, NativeBlueprint):
            if wanted not in (("auto",) if self._device.is_cpu else ("auto", TRITON)):
                raise ConfigError(
                    f"--attention-backend {wanted}: {self.name} does not run on our decoder, and"
                    " its rules of attention are not known before it runs; leave it out."
                )
            return TRITON
        is_latent = any(isinstance(shape, LatentShape) for shape in layout.shapes)
        if is_latent and wanted not in ("auto", TRITON):
            raise ConfigError(
                f"--attention-backend {wanted}: it does not read the compressed keys of"
                f" {self.name}; leave it out."
            )
        return choose_backend(
            wanted,
            blueprint.dtype,
            max(shape.head_dim for shape in layout.shapes),
            self._device.torch,
            is_deterministic=self._is_deterministic,
        )

    def _head(self, model: CausalModel, sampler: TokenSampler) -> TextHead:
        num_rows = self._config.schedule.max_batch_size
        return TextHead(
            *(model, sampler),
            max_batch_size=num_rows,
            device=self._device.torch,
            adapter_rows=model.adapter_rows if isinstance(model, Decoder) else None,
        )

    def _adapters(self, blueprint: Blueprint, stack: ExitStack) -> AdapterPool | None:
        """The adapters of the built model, if it takes any."""
        if not isinstance(blueprint, NativeBlueprint) or blueprint.adapters is None:
            return None
        reserve = partial(self._ledger.reserve, f"{self.name}/adapters")
        store = AdapterStore(blueprint.adapters, self._config.models, reserve)
        stack.callback(store.close)
        return AdapterPool(store, policy=self._config.adapters.lora_eviction_policy)

    def _draft(self, target: Blueprint, stack: ExitStack) -> DraftLoader | NoDraftLoader:
        """The loader of what drafts, if anything does."""
        if not self.generates:
            return NoDraftLoader()

        def open_memory(resolved: ResolvedModel, config: Config) -> ModelMemory:
            return ModelMemory(resolved, config, self._device, self._ledger, stack)

        given = self._resolved, self._config, self._device, target, open_memory
        return open_draft_loader(*given, sees_images=self.sees_images)

    def _lossy_rules(self) -> LossyRules | None:
        """The rules by which drafts count that were not sampled, if there are any."""
        return LossyRules.of(self._config.speculation) if self.generates else None

    def _lookup_rule(self) -> LookupRule | None:
        """How answers find drafts in their own text, if they do."""
        if not self.generates:
            return None
        options = self._config.speculation
        rule = LookupRule(
            min_match=options.speculative_ngram_min_match_window_size,
            max_match=options.speculative_ngram_max_match_window_size,
            max_drafts=options.num_speculative_tokens,
        )
        return rule if options.speculative_algorithm == NGRAM else None

    def _loaded(
        self,
        scheduler: TokenScheduler,
        runner: Runner,
        vocab_size: int,
        stack: ExitStack,
        ranks: Ranks | None = None,
    ) -> LoadedModel:
        """The loaded model with its grammar compiler; `stack` releases it."""
        open_vocabulary = partial(GrammarVocabulary.open, self._folder, self.name, vocab_size)
        scheduler.grammar_worker = grammar_worker = GrammarWorker(open_vocabulary)
        scheduler.tokens.vocab_size = vocab_size
        scheduler.tokens.drafting.lookup_rule = self._lookup_rule()
        scheduler.tokens.relaxes_reasoning = (
            self.generates and self._config.speculation.use_relaxed_acceptance_for_thinking
        )
        stack.callback(grammar_worker.close)
        return LoadedModel(
            name=self.name,
            reduced_context=self.reduced_context,
            scheduler=scheduler,
            runner=runner,
            close=stack.pop_all().close,
            connect=partial(_connect, scheduler, ranks),
            warm=grammar_worker.warm,
            attach=scheduler.exchange.attach,
        )

    def _exchange(
        self, scheduler: TokenScheduler, kv: KvCache, blueprint: Blueprint, stack: ExitStack
    ) -> None:
        """Open the page exchange with engines of the other role, or the tiers, if there are any."""
        plan, tiers = PipelinePlan.checked(self._config), TierPlan.of(self._config)
        head = "" if kv.layout.hidden is None else self._resolved.draft_digest
        page_format = PageFormat(
            weights=self._resolved.digest + head,  # which made the rows of hidden states
            layout=str(kv.layout),
            order="native" if kv.native is not None else "torch",
            compute=self._compute(blueprint),
            max_length=blueprint.max_length,
            page_bytes=max(kv.layout.part_bytes.values()),
        )
        if plan.sends_pages or plan.fetches_pages:
            pages = part_memories(kv)
            stack.callback(open_exchange(self.name, scheduler, pages, page_format, plan))
        elif tiers is not None:
            kept = structs.replace(
                page_format, compute=f"{page_format.compute} {self._versions(kv)}"
            )
            sizes = TierSizes(self._host_bytes, tiers.folder, tiers.disk_bytes)
            stack.callback(open_tiers(scheduler, part_memories(kv), kept, sizes))

    def _versions(self, kv: KvCache) -> str:
        """The programs that computed a page: others may round differently."""
        level = kv.native.level if kv.native is not None else self._device.name
        return f"{version('triptych')} {torch.__version__} {level}"

    def _compute(self, blueprint: Any) -> str:
        """The numerics of a model: equal values give equal bits on processors of one kind."""
        encoding, impl = self._config.models.quantization_encoding, type(blueprint).__name__
        return f"{blueprint.dtype} {encoding} {impl}"

    def _kind(
        self, ours: Any, fallback: str, native: NativeKernels | None, *, is_known: bool
    ) -> Any:
        """The blueprint class to use: our decoder's, or `fallback` for transformers."""
        wanted = self._config.models.model_impl
        is_ours = wanted == "native" or (wanted == "auto" and is_known)
        self._check_invariance(native, is_native=is_ours)
        return ours if is_ours else load(fallback)

    def _sizes(
        self,
        memory: ModelMemory,
        checkpoint: Checkpoint,
        native: NativeKernels | None,
        *,
        takes_blocks: bool,
    ) -> dict[str, Any]:
        """The arguments of every blueprint; one that `takes_blocks` also gets their encoding."""
        sizes = {
            "max_length": self._config.models.max_length,
            "dtype": memory.dtype(checkpoint.dtype, takes_blocks=takes_blocks),
            "device": self._device.torch,
            "native": native,
        }
        if not takes_blocks:
            return sizes
        return sizes | {"encoding": memory.encoding(checkpoint)}

    def _schedule(
        self, layout: KvLayout, size: CacheSize, max_length: int, *, shares: bool = True
    ) -> dict[str, Any]:
        """The arguments of every token scheduler."""
        return {
            "model": self.name,
            "pool": self._pool(layout, size, shares=shares),
            "options": self._config.schedule,
            "max_length": max_length,
            "namespace": self._namespace(layout, max_length),
        }


def _connect(scheduler: TokenScheduler, ranks: Ranks | None, post: Post) -> None:
    """Connect the scheduler and lost ranks with the function that posts to the loop's thread."""
    scheduler.connect(post)
    if ranks is not None:
        ranks.watch(lambda error: post(partial(crash, error)))
