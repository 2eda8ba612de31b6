"""Audio files and streams: decoding (in a child process), encoding, resampling. No torch."""
