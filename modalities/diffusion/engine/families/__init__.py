"""Diffusers' transformers and UNets, asked for many rows at different times in one run."""
