"""Text embeddings: encoder models, and pooled states of decoders."""
