"""Find out what a vLLM can do for training: `run` asks the `questions`, and `checks` judge the `answers`."""
