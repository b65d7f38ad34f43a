"""Requests with a seed, beside one another on a real vLLM: prompts that take several steps end nothing.

vLLM 0.32's CPU build ends its engine there; `whetstone.vllm.cpu_worker` says why.
"""

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

PROMPTS, PROMPT_TOKENS = 6, 1500
"""Together more than vLLM reads in a step (2,048 tokens by default on a CPU), each alone less."""


@pytest.mark.stack
def test_a_seed_draws_the_same_however_many_steps_its_prompt_takes(vllm_url: str) -> None:
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 260) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]

    def drawn(salt: str, seed: int) -> str:
        body = {
            "model": "starter@v0",
            "prompt": prompts[seed],
            "seed": seed,
            "max_tokens": 12,
            "ignore_eos": True,
            "cache_salt": salt,  # else the second answer's prompt would be known
        }
        response = httpx.post(f"{vllm_url}/v1/completions", json=body, timeout=120, trust_env=False, verify=False)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    alone = [drawn("alone", seed) for seed in range(PROMPTS)]
    with ThreadPoolExecutor(PROMPTS) as threads:
        together = list(threads.map(drawn, ["together"] * PROMPTS, range(PROMPTS)))
    assert together == alone
    assert len(set(alone)) == PROMPTS
