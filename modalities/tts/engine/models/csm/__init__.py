"""CSM: a backbone on the paged cache, a depth decoder for each frame's codes, and Mimi.

Importing this package loads no torch.
"""
