"""Hold the arithmetic of the gate: `verdict` compares two versions, `parity` what is served with what was trained."""
