"""Samplers whose state belongs to the row, so that rows at different steps share a batch."""
