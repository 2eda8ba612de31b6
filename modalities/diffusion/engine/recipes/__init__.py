"""From a prompt to a row, and from finished latents to an image: what each pipeline adds."""
