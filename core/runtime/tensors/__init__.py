"""Tensors out of checkpoints: the part of weight loading that needs torch."""
