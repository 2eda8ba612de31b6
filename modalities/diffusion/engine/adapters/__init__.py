"""LoRA: low-rank changes to an image model, of which every image may use others."""
