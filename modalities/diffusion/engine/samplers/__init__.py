"""Noise schedulers whose state is the row's own: rows at different steps share a batch."""
