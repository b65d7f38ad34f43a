"""Move trajectories and versions out (`exporting`) and in (`importing`); `repeat` asks recorded prompts again."""
