"""What transformers says of a vision model, in processes without torch."""
