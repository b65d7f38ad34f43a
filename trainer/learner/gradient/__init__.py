"""Compute a step's gradient: `objective` is a micro-batch's loss, `preferences` what KTO and DPO make of whole
trajectories, `accumulation` adds micro-batches up, `memory` is how many tokens fit into one.
"""
