"""Commands that move, query and remove what is recorded: `export`, `import_`, `sql` and `delete`."""
