"""Logical cache policy: catalogs, sessions, demand, and the manager that holds them."""
