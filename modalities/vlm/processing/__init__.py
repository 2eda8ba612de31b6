"""What transformers says of a model that sees, in processes without torch."""
