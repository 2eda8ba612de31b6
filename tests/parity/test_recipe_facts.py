"""Sizes that recipes hold of their own are those of diffusers' pipelines."""

from __future__ import annotations

from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

from support.diffusers_pipelines import FLOW, components, their_pipeline
from triptych.modalities.diffusion.engine.recipes import packed, qwen


def test_sizes_of_kontext() -> None:
    theirs = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
    assert sorted(packed.PREFERRED_KONTEXT_RESOLUTIONS) == sorted(theirs)


def test_sizes_of_images_that_qwen_edits() -> None:
    theirs = pipeline_qwenimage_edit_plus
    for name in ("CONDITION_IMAGE_SIZE", "VAE_IMAGE_SIZE"):
        assert getattr(qwen, name) == getattr(theirs, name)
        for aspect in (0.3, 0.77, 1.0, 1.5, 3.0):
            expected = theirs.calculate_dimensions(getattr(theirs, name), aspect)
            assert qwen.calculate_dimensions(getattr(qwen, name), aspect) == expected


def test_ovis_images_instruction() -> None:
    theirs = their_pipeline("OvisImagePipeline", components("OvisImagePipeline"), FLOW)
    ours = packed.OvisImage
    expected = theirs.system_prompt, theirs.user_prompt_begin_id
    assert expected == (ours.INSTRUCTION, ours.NUM_INSTRUCTION)
