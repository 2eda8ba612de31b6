"""The family of the embedded model that sees: pictures told in soft tokens, slot by slot."""
