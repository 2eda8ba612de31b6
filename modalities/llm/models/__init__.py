"""Model families: how each reads its config and names its tensors."""
