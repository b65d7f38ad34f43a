"""Compute a step's gradient.

`objective` is a micro-batch's loss, `preferences` what KTO and DPO make of whole trajectories, `divergence` the
distance from a teacher; `beforehand` reads what these two need. `accumulation` adds micro-batches up, `memory` is how
many tokens fit into one.
"""
