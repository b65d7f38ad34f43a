"""`whetstone demo`: start the stack, let a stock agent play against it, show the reward rise.

- `demo` drives the run from outside the stack: start, train, measure, report.
- `agent_process` runs an app as a process of its own and reads the report it ends with.
- `curve` draws reward by version, as text and as a picture.
- `tictactoe/` holds the agent: two scripts on the plain `openai` package that import nothing of Whetstone. They are
  started by their path, never imported.
"""
