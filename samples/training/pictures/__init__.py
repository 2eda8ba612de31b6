"""Pictures made of sprites, and words that are true of them: what models of images learn from."""
