"""OpenAI's responses: `schema` is what a request may hold, `request` makes it a chat; `answer` and `stream` go back.

`stored` rebuilds earlier responses from the records, for requests that refer to them.
"""
