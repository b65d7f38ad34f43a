"""Move trajectories and versions out (`exporting`) and in (`importing`)."""
