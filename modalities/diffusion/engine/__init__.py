"""Images in the engine process: loading, denoising, decoding. The place of torch."""
