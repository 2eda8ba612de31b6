"""Higgs Audio V2: a Llama with a second MLP for sound, eight codebooks one step apart each."""
