"""Ask a teacher how likely it finds the tokens of an answer: another vLLM server, of a model with the same tokenizer.

The request is a completion of one token with logprobs of its prompt, which is the answer with what stands before it.
Such a request ends vLLM's CPU build if LoRA is enabled there, so no server that answers for a policy is ever asked.
"""

import os
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import httpx
import msgspec

from trainer.domain.examples.own_answers import TopTokens
from trainer.errors import TeacherUnusable, TrainerError
from whetstone.config.teachers import TeacherSettings

TIMEOUT_S = 300.0
"""Of one answer. A CPU reads some thousand tokens in that time."""
TRIES = 3
SERVER_ERROR = 500
PROBE = 'Whetstone: "the 3rd café"\n\t{"a": [1, 2.50]}  naïve 漢字 — ok!'
"""A text that tokenizers of different models divide differently."""
OF_A_POLICY = re.compile(r"@v\d+$")
"""Our own servers, and only those, name models so."""


class AnswerRefused(TrainerError):
    """The teacher refuses this one answer, for example because it is too long for it."""


class _Token(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Token] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Teacher:
    """A server that scores answers, by its name in the settings. Threads may share it."""

    def __init__(self, name: str, settings: TeacherSettings, top: int, vocabulary: int | None) -> None:
        """`top`: how many of its likeliest tokens are wanted; `vocabulary`: how many the policy's model has.

        Raises:
            TeacherUnusable: its key is not in the environment.
        """
        self._name, self._model = name, settings.model
        self._top, self._vocabulary = top, vocabulary
        headers = {}
        if settings.api_key_env is not None:
            if not (key := os.environ.get(settings.api_key_env, "").strip()):
                raise self._unusable(f"the environment has no {settings.api_key_env}")
            headers = {"Authorization": f"Bearer {key}"}
        self._root = settings.url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(base_url=self._root, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def check(self, policies: Collection[str], tokens_of: Callable[[str], list[int]]) -> None:
        """Check that it may be asked, and divides text as the policy's model does (`tokens_of`).

        Raises:
            TeacherUnusable: it is a server of ours (`policies`), has no such model or another tokenizer, or does not
                answer.
        """
        served = [model.id for model in self._ask("GET", "/v1/models", None, _Models).data]
        if ours := next((name for name in served if name in policies or OF_A_POLICY.search(name)), None):
            raise self._unusable(
                f"{self._root} serves {ours}, a policy: start another vLLM for the teacher's model, without LoRA"
            )
        if self._model not in served:
            raise self._unusable(f"{self._root} has no model {self._model!r}; it has: {', '.join(served) or 'none'}")
        body = {"model": self._model, "prompt": PROBE, "add_special_tokens": False}
        if self._ask("POST", "/tokenize", body, _Tokens).tokens != tokens_of(PROBE):
            raise self._unusable("its tokenizer divides text otherwise than the policy's model does")

    def scores(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> TopTokens:
        """Return its likeliest tokens at each of the answer's tokens, and their logprobs at temperature 1.

        Raises:
            AnswerRefused: it refuses this answer.
            TeacherUnusable: it does not answer, or not as vLLM does.
        """
        body = {
            "model": self._model,
            "prompt": [*prompt_ids, *token_ids],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self._top,
        }
        (choice,) = self._ask("POST", "/v1/completions", body, _Completion).choices
        places = (choice.prompt_logprobs or [])[len(prompt_ids) :]
        if len(places) != len(token_ids):
            raise self._unusable(f"{self._root} gives no prompt_logprobs, as vLLM does")
        each = [self._likeliest(place or {}) for place in places]
        return TopTokens(tuple(ids for ids, _ in each), tuple(logprobs for _, logprobs in each))

    def _likeliest(self, place: dict[str, _Token]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return the K likeliest tokens of a place: the token that is there may be one more."""
        ranked = sorted(place.items(), key=lambda one: -one[1].logprob)[: self._top]
        if len(ranked) < self._top:
            raise self._unusable(f"it gives {len(ranked)} tokens instead of trainer.distill_top = {self._top}")
        ids = tuple(int(token_id) for token_id, _ in ranked)
        if self._vocabulary is not None and max(ids) >= self._vocabulary:
            raise AnswerRefused(f"token {max(ids)} is none of the policy's model, which has {self._vocabulary}")
        return ids, tuple(token.logprob for _, token in ranked)

    def _ask(self, method: str, path: str, body: object, expected: type[Any]) -> Any:
        for left in reversed(range(TRIES)):
            try:
                response = self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                if left:
                    continue
                raise self._unusable(f"{self._root} cannot be reached: {error}") from error
            if response.status_code >= SERVER_ERROR and left:
                continue
            break
        if response.is_error:
            why = f"{self._root}{path} answers {response.status_code}: {response.text[:300]}"
            if response.status_code < SERVER_ERROR and path == "/v1/completions":
                raise AnswerRefused(why)
            raise self._unusable(why)
        try:
            return msgspec.json.decode(response.content, type=expected)
        except msgspec.MsgspecError as error:
            raise self._unusable(f"{self._root}{path} answers, but not as vLLM does: {error}") from error

    def _unusable(self, why: str) -> TeacherUnusable:
        return TeacherUnusable(f"teachers.{self._name}: {why}")
