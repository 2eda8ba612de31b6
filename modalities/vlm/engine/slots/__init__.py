"""The family of the embedded vision model: images as soft tokens, slot by slot."""
