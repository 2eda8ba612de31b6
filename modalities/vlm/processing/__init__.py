"""Image processing and model facts from transformers, in processes without torch."""
