"""From written text to utterances that can be spoken, with every word traced to its source.

`normalize` reads digits and signs out as words, `chunks` cuts the result into utterances, `guard`
and `coverage` watch what an engine makes of them. Nothing here loads torch or knows a model.
"""
