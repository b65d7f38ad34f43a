"""Run benchmarks.learning.step on Unsloth's backend, in its environment: our side alone, the same table."""

try:
    import unsloth  # noqa: F401  # first of all: it patches what is imported after it
except ImportError as error:
    raise SystemExit(f"not run: Unsloth is not installed here ({error})") from error

from benchmarks.learning.step.__main__ import main

if __name__ == "__main__":
    main("unsloth")
