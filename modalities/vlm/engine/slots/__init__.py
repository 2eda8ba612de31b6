"""The family of the embedded model that sees: pictures as soft tokens, slot by slot."""
