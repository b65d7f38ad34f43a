"""OpenAI's responses: `request` makes a request a chat; `answer` and `stream` go back.

`schema` is what a request may hold, `tools` what becomes of its tools, both written in `shapes`. `custom`: the text of
a custom tool's call. `stored` rebuilds earlier responses from the records, for requests that refer to them.
"""
