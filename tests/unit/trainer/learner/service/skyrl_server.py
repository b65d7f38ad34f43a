"""Start SkyRL's server of the Tinker API on a CPU: `python skyrl_server.py MODEL PORT FOLDER`, in its environment.

Its engine is started by this Python rather than by `uv run`. SkyRL 0.3 asks pydantic for `typing.TypedDict`, which that
takes from Python 3.12 on only; before, it wants the one of typing_extensions.
"""

import os
import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict

MOST_ADAPTERS = 8


def main(model: str, port: int, folder: str) -> None:
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, config_to_argv

    api._build_uv_run_cmd_engine = lambda _parent, config: [
        sys.executable, __file__, "engine", *config_to_argv(config)
    ]  # fmt: skip
    api.app.state.engine_config = EngineConfig(
        base_model=model,
        backend="jax",
        backend_config={"max_lora_adapters": MOST_ADAPTERS, "max_lora_rank": 16, "loss_chunk_size": 0},
        checkpoints_base=f"{folder}/checkpoints",
        database_url=f"sqlite:///{folder}/tinker.db",
    )
    uvicorn.run(api.app, host="127.0.0.1", port=port)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    if sys.argv[1] == "engine":
        import runpy

        sys.argv = ["engine", *sys.argv[2:]]
        runpy.run_module("skyrl.tinker.engine", run_name="__main__")
    else:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
