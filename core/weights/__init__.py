"""Where weights come from: resolving a model reference, verifying it, reading its tensors."""
