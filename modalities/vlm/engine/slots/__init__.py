"""The family of the embedded model that sees: pictures told in soft words, slot by slot."""
