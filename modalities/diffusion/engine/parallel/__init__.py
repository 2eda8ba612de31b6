"""Drawing on several ranks: branches of guidance, and tokens of a picture."""
