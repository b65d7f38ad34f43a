"""The command `whetstone`: `main` lists the commands of `commands`, which `lazy` imports when they run; `options` has
what they share, `tables` what they print.
"""
