"""Decoder-only language models by their published layouts: configurations, tensor names."""
