"""What each dialect's bytes mean: a request in, the bytes for upstream out; an answer in, the bytes for the app out.

Pure: nothing here opens a socket or knows a table. `dialect` is what all dialects have in common.
"""
