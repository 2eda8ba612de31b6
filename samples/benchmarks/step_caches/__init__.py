"""Step caches measured on one model: the distance of their images to uncached ones, and the costs.

`subject` generates images, `methods` are the compared caches, `search` finds the settings of each,
`measures` compares images, `report` makes the table and the plot. `image_caches.py` in the parent
folder runs them, `image_cache_costs.py` measures costs on large models.
"""
