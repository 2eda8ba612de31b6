"""Higgs Audio V2: a Llama with a second MLP for sound, eight codebooks one step apart each.

Importing this package loads no torch.
"""

CODEC_FOLDER = "audio_tokenizer"
"""Where the tokenizer of sound, published by itself, is looked for in the model's folder."""
