"""Chat in the engine process: loading, and the fallback to transformers. May import torch."""
