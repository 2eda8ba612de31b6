"""The layout of a Higgs Audio V2 folder."""

CODEC_FOLDER = "audio_tokenizer"
"""The folder of the audio tokenizer (published separately) in the model's folder."""
