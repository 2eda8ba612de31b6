"""From a prompt to a row, and from finished latents to a picture: what each pipeline adds."""
