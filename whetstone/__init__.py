"""What every program shares, and the command line.

From bottom to top: `domain` (values and rules), `config` (settings), `database` (the engine), `observability`
(logs, traces), `messaging` (Celery), `terminal`, `memory` (what fits on a device), `vllm`, `privacy`, `registry`
(projects, policies, versions, keys), `models` (base models from the package index), `transfer` (export and import),
`calls` (calls as they come), `doctor`, `stack` (`whetstone up`), `demo`, `backup`, `cli`. `torch_builds` hides packages
that do not match PyTorch's build; `errors` has the base class of all errors.
"""

__version__ = "0.2.0"
