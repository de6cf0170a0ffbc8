"""The control plane: drain events, apply them, plan once, check, hand out."""
