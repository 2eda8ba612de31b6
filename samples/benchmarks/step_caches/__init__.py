"""Step caches measured on one model: how near their images come to uncached ones, at what cost.

`subject` draws, `methods` are what is compared, `search` finds the settings of each, `measures`
compare images, `report` makes the table and the plot. `image_caches.py` beside this folder runs
them, `image_cache_costs.py` the costs on large models.
"""
