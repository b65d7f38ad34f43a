"""Keep adapter folders: `files` writes and reads them, `retention` removes old folders."""
