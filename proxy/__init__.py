"""Serve OpenAI's API in front of vLLM, record every completion, take feedback.

The way of a request: `http` makes the bytes of a socket a request; `admission` lets it in or refuses it before its body
is read; `app` gives it to its project's `inference`, which does the rest in this order: `wire` reads the body,
`trajectories` finds the trajectory that it continues, `domain` chooses the version, `upstream` the vLLM server; `wire`
translates the answer while it goes to the app; `recording` has the call in a journal on disk before the last byte goes
out, and in SQL a moment after it.

The way of feedback: `http` and `admission` as above, then `api`, which checks it and gives it to `recording`; the row
in SQL is what the program `judge` looks for.

Beside them: `dashboard` has the pages, `metrics` what Prometheus reads, `background` the samples that no app waits for.
`app` builds everything, `project` what belongs to one project, `server` runs it; `supervision` keeps alive what runs
beside the requests, `tuning` sets what concerns the whole process, `errors` is the tree of what can go wrong.
"""
