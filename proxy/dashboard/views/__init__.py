"""Shape what was read so that a template can show it. Pure."""
