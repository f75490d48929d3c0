"""Values and pure functions that choose what an admission starts from and what it costs others."""
