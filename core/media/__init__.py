"""Files from strangers, decoded where they can do no harm."""
