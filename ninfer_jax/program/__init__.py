"""The only physical authority: buffers, allocators, reservations and execution."""
