"""OpenAI's chat completions.

`request` in, `answer` or `stream` out; `answer_template` and `chunk_template` make it fast.
"""
