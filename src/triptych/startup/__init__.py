"""The output of a start: a table on a terminal, log lines elsewhere."""
