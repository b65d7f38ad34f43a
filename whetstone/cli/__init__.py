"""The command `whetstone`: `main` has the commands of `commands`, `options` what they share; `tables` is what they
print.
"""
