"""Attention and page kernels: one validated public function each, a plain reference beside it."""
