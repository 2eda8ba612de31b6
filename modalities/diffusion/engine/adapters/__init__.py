"""LoRA adapters of image models, chosen per image."""
