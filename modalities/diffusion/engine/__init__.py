"""Images in the engine process: loading, denoising, decoding. Uses torch."""
