"""What is learned: groups of scored trajectories -> rows -> one GRPO step on a LoRA -> an adapter on disk.

A step's way: `advantages` (what each trajectory was worth, against its group) -> `rows` (the very ids that were
sampled, merged by prefix) -> `batches` (rows of like length together) -> `learner` (forward, `losses`, backward, one
optimizer update) -> `adapter` (written whole or not at all). Only `learner` and `losses` import torch; nothing here
tokenizes.
"""
