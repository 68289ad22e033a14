"""flash-attn."""
