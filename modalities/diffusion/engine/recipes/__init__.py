"""Per-pipeline recipes: from a prompt to a row, and from finished latents to an image."""
