"""LoRA: low-rank changes to an image model, of which every picture may use others."""
