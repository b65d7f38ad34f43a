"""Take one step in several processes: `team` starts them, `remote` passes orders on, `collective` adds gradients up."""
