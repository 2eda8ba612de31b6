"""The embedded voice: phonemes to speech tokens at 20 Hz, and tokens to sound as they come."""
