"""Kokoro-82M: phonemes and a voice to 24 kHz speech, a sentence at a time.

Importing this package loads no torch; the entry point is `loader.KokoroLoader`.
"""
