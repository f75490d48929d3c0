"""Inference for Qwen3.5 hybrid models, with a planner that decides what context to keep."""
