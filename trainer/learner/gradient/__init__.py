"""Compute a step's gradient: `objective` is a micro-batch's loss, `accumulation` adds micro-batches up, `memory` is how
many tokens fit into one.
"""
