"""Answers in a form that a caller prescribes: grammars over a vocabulary. Loads no torch."""
