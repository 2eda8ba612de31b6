"""LoRA: low-rank changes to an image model, of which every picture may use others."""

from triptych.modalities.diffusion.engine.adapters.adapters import Adapters, adapter_bytes

__all__ = ["Adapters", "adapter_bytes"]
