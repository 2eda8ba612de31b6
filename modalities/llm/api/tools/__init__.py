"""Tools that a model may call: what is declared, how calls are written, how answers are read."""
