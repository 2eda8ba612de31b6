"""Model weights: resolving references, verifying files, reading tensors."""
