"""From written text to utterances to speak, with every word mapped to its source.

`normalize` replaces digits and signs by words, `chunks` splits the result into utterances, `guard`
and `coverage` limit and measure their speech. Nothing here loads torch or knows a model.
"""
