"""What the trainer replays is what vLLM's own sampler does to the same logits."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.domain.constraints import Constraints
from trainer.learner.constrained import supports
from trainer.learner.constrained.bending import ConstrainedTokens, bend, chunks

pytestmark = [
    pytest.mark.slow,  # vLLM's imports alone take ten seconds
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, when vLLM compiles a function at its import
]
VOCABULARY = 40
ENDS = (7,)
"""The model's own; vLLM adds its eos to a request's stop ids."""


def some_constraints(rng: random.Random) -> dict[str, Any]:
    """Half of all constraints, at random values, in the form of `completions.constraints`."""
    every = {
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.choice([rng.uniform(0.5, 1), rng.uniform(1, 2)]),
        "logit_bias": {str(rng.randrange(VOCABULARY)): rng.uniform(-150, 150), str(rng.randrange(VOCABULARY)): 1.0},
        "min_tokens": rng.randint(1, 9),
        "allowed_token_ids": sorted({*rng.sample(range(VOCABULARY), 25), *ENDS}),
        "top_k": rng.randint(1, VOCABULARY + 5),
        "top_p": rng.uniform(0.05, 0.99),
        "min_p": rng.uniform(0.001, 0.5),
    }
    return {name: value for name, value in every.items() if rng.random() < 0.5}


def by_vllm(
    logits_CV: Tensor, prompt: list[int], output: list[int], constraints: dict[str, Any], stop: list[int], heat: float
) -> Tensor:
    """Return the log probabilities (C, V) that vLLM's sampler uses for each of the completion's tokens."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import (
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        MinTokensLogitsProcessor,
    )
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    count = len(output)
    params = SamplingParams.from_optional(
        logit_bias=constraints.get("logit_bias"),
        min_tokens=constraints.get("min_tokens", 0),
        min_p=constraints.get("min_p", 0.0),
        stop_token_ids=stop,
        max_tokens=100,
    )
    params.update_from_generation_config({}, ENDS[0])
    outputs = [output[:offset] for offset in range(count)]
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=count))
    cpu = torch.device("cpu")
    processors = [
        kind(config, cpu, False) for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    ]
    added = [(place, params, prompt, ids) for place, ids in enumerate(outputs)]
    for processor in processors:
        processor.update_state(BatchUpdate(batch_size=count, removed=[], added=added, moved=[]))
    barred = None
    if "allowed_token_ids" in constraints:
        barred = torch.ones(count, VOCABULARY, dtype=torch.bool)
        barred[:, constraints["allowed_token_ids"]] = False

    def each(name: str, default: float) -> Tensor:
        return torch.full((count,), float(constraints.get(name, default)))

    metadata = SamplingMetadata(
        temperature=torch.full((count,), heat),
        all_greedy=False,
        all_random=True,
        top_p=each("top_p", 1.0) if "top_p" in constraints else None,
        top_k=each("top_k", 0).clamp(max=VOCABULARY).int() if "top_k" in constraints else None,
        generators={},
        max_num_logprobs=-1,
        no_penalties=False,
        prompt_token_ids=torch.tensor([prompt] * count),
        frequency_penalties=each("frequency_penalty", 0.0),
        presence_penalties=each("presence_penalty", 0.0),
        repetition_penalties=each("repetition_penalty", 1.0),
        output_token_ids=outputs,
        allowed_token_ids_mask=barred,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(processors),
    )
    sampler = Sampler("processed_logprobs")
    return sampler(logits_CV.clone(), metadata).logprobs_tensors.logprobs


@pytest.mark.parametrize("seed", range(40))
def test_random_constraints_do_what_vllms_sampler_does(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
    output = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
    logits_CV = 3 * torch.randn(len(output), VOCABULARY, generator=generator)
    recorded, stop, heat = some_constraints(rng), rng.sample(range(VOCABULARY), 2), rng.uniform(0.3, 1.5)
    theirs_CV = by_vllm(logits_CV, prompt, output, recorded, stop, heat)

    constraints = Constraints.of(recorded, stop)
    assert not constraints.unknown
    tokens = ConstrainedTokens(
        constraints,
        at_C=torch.arange(len(output)),
        offsets_C=torch.arange(len(output)),
        prompt_ids_P=torch.tensor(prompt),
        output_ids_N=torch.tensor(output),
        barred_ids=tuple(constraints.barred_ids(ENDS)),
        supports_CB=None,
    )
    z_CV = bend(logits_CV, tokens) / heat
    support_CV = supports.support(z_CV, constraints)
    assert torch.equal(support_CV, theirs_CV > -torch.inf)
    ours_CV = z_CV.masked_fill(~support_CV, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(ours_CV, theirs_CV, rtol=0, atol=2e-5)

    # Some of the tokens, cut into chunks, are bent as all of them are.
    places = sorted(rng.sample(range(len(output)), rng.randint(1, len(output))))
    some = replace(tokens, at_C=torch.tensor(places), offsets_C=torch.tensor(places))
    cut = [part for chunk in chunks([some], 3) for part in chunk]
    torch.testing.assert_close(torch.cat([bend(logits_CV[part.at_C], part) for part in cut]) / heat, z_CV[places])


def test_tokens_that_tie_with_the_last_one_are_allowed_too() -> None:
    z_CV = torch.tensor([[3.0, 1.0, 1.0 + 1e-6, 0.0]])
    assert supports.support(z_CV, Constraints(top_k=2)).tolist() == [[True, True, True, False]]
    assert supports.support(z_CV, Constraints(top_p=0.1)).tolist() == [[True, False, False, False]]


def test_supports_come_back_as_they_were() -> None:
    support_CV = torch.rand(5, 19) < 0.3
    packed = supports.pack(supports.bits(support_CV))
    unpacked = supports.unpack(packed, 5)
    assert unpacked is not None
    assert torch.equal(supports.mask(unpacked, 19, torch.device("cpu")), support_CV)
    assert supports.unpack(b"", 5) is None
