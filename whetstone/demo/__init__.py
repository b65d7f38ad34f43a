"""Show an agent that learns: `demo` runs the stack and the agent (`agent_process`, which starts `tictactoe`), and draws
the `curve`.
"""
