"""Erase a trajectory or a user everywhere: `eraser` decides, `store` and `rows` delete."""
