"""Scheduling of token generation: sequences, batches, the batching policy, grammars."""
