"""Where Higgs Audio V2 keeps its parts."""

CODEC_FOLDER = "audio_tokenizer"
"""Where the tokenizer of sound, published by itself, is looked for in the model's folder."""
