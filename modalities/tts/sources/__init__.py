"""Speech models that come under names of their own: where they are, how they are converted."""
