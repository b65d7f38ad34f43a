"""Let a language model rank the attempts of a group, so that apps without a reward learn too (RULER).

`ranker` takes a `lease` on a group and reads it, makes a `ranking_input` (by `conversation` and `shorten`) and obtains
each `judgement`: a `prompt` to a judge, sent by `llm`, checked by `parse`; `aggregate` joins them. `errors` says why a
judge gave none.
"""
