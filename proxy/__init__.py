"""Serve OpenAI's API in front of vLLM, record every completion, take feedback.

A request passes `http` (bytes on sockets), `admission` (may it come in), `inference` (the served call),
`trajectories` (which trajectory it continues), `upstream` (which vLLM answers), `wire` (what the bytes mean in
each dialect), and `recording` (journal, then SQL) before the last byte goes out. `api` has the routes beside
inference, `dashboard` the pages, `metrics` what Prometheus reads, `background` the samples that no app waits
for. `domain` holds the values that all of them share. `app` builds everything, `project` what belongs to one
project, `server` runs it; `supervision` keeps what runs beside the requests alive, `tuning` sets what concerns the
whole process, `errors` is the tree of what can go wrong.
"""
