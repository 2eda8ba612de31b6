"""GGUF files as folders of safetensors, configuration and tokenizer."""
