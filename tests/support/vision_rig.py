"""The rig for models that see: encodes what rows need, and knows what transformers would say."""

from __future__ import annotations

import asyncio
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from PIL import Image

from support.decoder_rig import CPU, Recorder, Rig, Row
from support.image_prompts import ImagePrompt, join_prompt
from support.rank_threads import PlanQueue
from support.vision_models import IMAGE_ID, encode
from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.engine_api.pixels import Pixels
from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.prompt_content import PromptContent
from triptych.core.media.fetch import Fetched
from triptych.core.options.config import Config
from triptych.core.runtime.devices.stream import StepStream
from triptych.core.runtime.engine.rank_sampler import LeadingSampler
from triptych.core.runtime.engine.ranks import LeadingRunner
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.vlm.api.preparation import PooledPreparation
from triptych.modalities.vlm.configs.config import open_image_processor
from triptych.modalities.vlm.configs.processor_files import needs_torch
from triptych.modalities.vlm.engine.blueprint import VisionBlueprint, is_native
from triptych.modalities.vlm.engine.encoder import open_cache
from triptych.modalities.vlm.engine.fallback import FallbackVisionBlueprint
from triptych.modalities.vlm.engine.head import VisionHead
from triptych.modalities.vlm.engine.runner import VisionRunner, plan_message
from triptych.modalities.vlm.engine.step_features import CachedFeatures, LeadingFeatures
from triptych.modalities.vlm.plan import EncodePlan
from triptych.modalities.vlm.prepared import PreparedImage
from triptych.modalities.vlm.processing.processor import ImageProcessor
from triptych.modalities.vlm.scheduling.prompts import VisionLimits

Part = Sequence[int] | Pixels


class ChildProcessor:
    """The processor of a model in a child process, where transformers finds its library."""

    def __init__(self, folder: Path) -> None:
        model = ResolvedModel(name="tiny", reference="x", folder=str(folder), digest="test")
        self._prepare = PooledPreparation([model], Config(), num_children=1)

    def prepare(self, pixels: Pixels) -> PreparedImage:
        file = io.BytesIO()
        Image.frombytes("RGB", (pixels.width, pixels.height), pixels.rgb).save(file, "png")
        fetched = Fetched(file.getvalue(), "image/png")
        return asyncio.run(self._run(fetched))

    async def _run(self, file: Fetched) -> PreparedImage:
        return await self._prepare(file, model="tiny", max_pixels=2**20)


_child_of = functools.cache(ChildProcessor)  # it takes seconds to start


class VisionRecorder(Recorder):
    """A vision model that remembers the logits it gave."""

    def see(self, *args: Any) -> torch.Tensor:
        return self.model.see(*args)


@dataclass
class VisionRow(Row):
    images: tuple[PromptContent, ...] = field(default=())


class VisionRig(Rig):
    """A rig around the model in `folder`; with `ranks` it is rank 0, and they follow its plans."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        native: NativeKernels | None = None,
        ranks: PlanQueue | None = None,
        adapters: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        with Checkpoint.open(folder) as checkpoint:
            kind: Any = FallbackVisionBlueprint
            if is_native(checkpoint.config):
                kind = partial(VisionBlueprint, native=native)
            blueprint = kind(checkpoint, max_length=0, dtype=dtype, device=CPU)
            if ranks is not None:
                blueprint.text.join(ranks.group)
                assert blueprint.share_encoder(ranks.group)
            if adapters:
                from support.text_adapters import put_adapters, room_for  # imports peft

                blueprint.text.adapter_room = room_for(adapters)
            decoder, encoder = blueprint.build(lambda _: None)
        if adapters:
            put_adapters(blueprint.text, adapters)
        self.limits = VisionLimits(
            max_step_patches=64,
            whole_spans=blueprint.traits.whole_spans,
            whole_prompts=blueprint.traits.whole_prompts,
        )
        self.features = open_cache(2**20, 64)
        self.processor: ImageProcessor | ChildProcessor
        if needs_torch(folder):
            self.processor = _child_of(folder)
        else:
            self.processor = ImageProcessor.open(folder, model="test")

        def head_of(model: Any, sampler: Any, **given: Any) -> VisionHead:
            source: Any = CachedFeatures(self.features, dtype)
            if ranks is not None:
                sampler = LeadingSampler(sampler, ranks.group)
                source = LeadingFeatures(self.features, dtype, ranks.group)
            head = VisionHead(model, sampler, source, blueprint.traits, **given)
            head.adapter_rows = decoder.decoder.adapter_rows if adapters else None
            return head

        self.head_type = head_of
        layout = blueprint.text.kv_layout(4, dtype)
        self.encode = encode
        options = {"max_length": 256, **options, "recorder": VisionRecorder, "native": native}
        super().__init__(decoder, layout, **options)
        stream = StepStream(CPU)
        self.runner = VisionRunner(self.runner, encoder, self.features, CPU, stream)
        if ranks is not None:
            self.runner = LeadingRunner(self.runner, ranks, plan_message)

    def prompt(self, *parts: Part) -> ImagePrompt:
        prepared = [
            self.processor.prepare(part) if isinstance(part, Pixels) else part for part in parts
        ]
        return join_prompt(prepared, self.encode)

    def look(self, *parts: Part) -> VisionRow:
        """A row whose images are encoded."""
        prompt = self.prompt(*parts)
        row = VisionRow(self.free_slots.pop(), list(prompt.prompt_ids), len(prompt.prompt_ids))
        row.images = prompt.images
        if row.images:
            plan = EncodePlan(step_id=0, model="test", kind="encode", images=row.images)
            assert self.runner.launch(plan).result().rows == [None] * len(row.images)
        return row

    def _bound(self, sequence: Row, row: TokenRow) -> TokenRow:
        bound = super()._bound(sequence, row)
        spans = tuple(image.span for image in getattr(sequence, "images", ()))
        return structs.replace(bound, contents=spans)


def class_inputs(model: Any, folder: Path, rig: VisionRig, parts: Sequence[Part]) -> dict[str, Any]:
    """The inputs of transformers' model for a prompt."""
    images = [part for part in parts if isinstance(part, Pixels)]
    arrays = [np.frombuffer(p.rgb, np.uint8).reshape(p.height, p.width, 3) for p in images]
    inputs: dict[str, Any] = {}
    family = rig.processor.family
    if arrays:
        processor = open_image_processor(folder)
        options = family.options(model.config)
        found = processor(
            images=[arrays] if family.nests_images else arrays, return_tensors="pt", **options
        )
        inputs = {name: found[name] for name in family.inputs if name in found}
    ids_T = torch.tensor(rig.prompt(*parts).prompt_ids)
    is_image_T = ids_T >= FIRST_FRAME_ID
    ids_1T = ids_T.masked_fill(is_image_T, IMAGE_ID)[None]
    if model.config.model_type.startswith(("qwen", "glm")):
        inputs["mm_token_type_ids"] = is_image_T.int()[None]
    elif family.whole_spans:
        inputs["token_type_ids"] = is_image_T.int()[None]
    elif family.whole_prompts and images:
        inputs["token_type_ids"] = torch.zeros_like(ids_1T)
    return {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T), **inputs}


def generate(
    model: Any, folder: Path, rig: VisionRig, parts: Sequence[Part], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers, and the logits before each."""
    inputs = class_inputs(model, folder, rig, parts)
    output = model.generate(
        **inputs,
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(output.logits)
