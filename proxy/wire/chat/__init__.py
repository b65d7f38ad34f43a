"""OpenAI's chat completions.

`request` in, `answer` or `stream` out. Both read what has the form of the answer or chunk before it in one pass.
"""
