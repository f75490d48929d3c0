"""Qwen3.5 in Flax: weights in, logits and a new cache out. Knows no request and no plan."""
