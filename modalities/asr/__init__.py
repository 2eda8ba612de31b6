"""Speech recognition: transcribing audio to text with timestamps."""
