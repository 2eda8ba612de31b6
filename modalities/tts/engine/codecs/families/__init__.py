"""One file per codec family: how codes become latents, and what its composite modules do."""
