"""Commands on what is recorded: `export`, `import_`, `sql`, `delete`, `backup` (and restore)."""
