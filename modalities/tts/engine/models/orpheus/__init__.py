"""Orpheus: a Llama that writes SNAC codes as tokens, seven to a frame.

Importing this package loads no torch.
"""
