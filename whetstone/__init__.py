"""Command line, settings and task names: leaves that every program may import. Imports no program of ours."""

__version__ = "0.1.0"
