"""Anthropic's messages.

`schema` is what a request may hold, `request` makes it a chat, `answer` makes the chat a message.
"""
