"""Codec families, one file each: how codes become latents, and rules for composite modules."""
