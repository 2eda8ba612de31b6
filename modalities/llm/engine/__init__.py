"""Chat in the engine process: loading, and the fallback to transformers. The place of torch."""
