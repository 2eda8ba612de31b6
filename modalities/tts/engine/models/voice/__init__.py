"""The embedded voice: phonemes to speech tokens at 20 Hz, and tokens to streamed sound."""
