"""Diffusers' transformers and UNets, run for many rows at different timesteps at once."""
