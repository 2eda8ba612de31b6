"""Language models that are not ours: transformers' own, on our paged cache."""
