"""Settle what is due in short transactions.

`sweep` finds it, `batch_runner` takes it in batches, `write_back` writes it.
"""
