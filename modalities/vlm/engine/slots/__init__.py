"""The family of the embedded vision model: pictures as soft tokens, slot by slot."""
