"""Erase a trajectory or a user everywhere: `eraser` deletes, `store` knows the requests and what they cover."""
