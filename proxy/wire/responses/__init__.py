"""OpenAI's responses: `schema` is what a request may hold, `request` makes it a chat; `answer` and `stream` go back."""
