"""What runs the steps of any model: runners, heads, what loaders share. A place of torch."""
