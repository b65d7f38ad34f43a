"""Hold the arithmetic of the gate.

`verdict` compares two versions by rewards, `retention` a version with the base model by fixed prompts, `parity` what is
served with what was trained, `handover` a policy with the model of another server whose place it takes.
"""
