"""Hold answers of one version with the server's logprobs: sampled for the probe, or taken from the step's own rows."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trainer.domain.rows import Answer, Row
from trainer.learner import prefix_trees
from trainer.learner.engine import Engine

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SteppedRows:
    """The rows of the step that made the candidate."""

    rows: Sequence[Row]
    mismatch_k3: float | None
    """k3 of server to trainer with the parent's weights, in nats a token of the parent's; see `StepFigures`."""
    forward_s: float
    """Seconds of a token in a forward pass."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one version, and vLLM's logprobs of all their tokens, in nats."""

    answers: list[Answer] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Mean tokens of an answer."""
        return len(self.logprobs) / len(self.answers)

    @property
    def contexts(self) -> list[int]:
        """A number for each token: equal ones have the same prompt and answer before them."""
        numbers: dict[tuple[Prompt, Prompt], int] = {}
        return [
            numbers.setdefault((answer.prompt_ids, answer.token_ids[:place]), len(numbers))
            for answer in self.answers
            for place in range(len(answer.token_ids))
        ]

    def longest(self, most_tokens: int, ends: Collection[int]) -> int:
        """Return the tokens of the longest comparable answer: `most_tokens`, or fewer where apps cut answers off.

        An answer that was not cut off ends with one of `ends`.
        """
        cut = any(len(answer.token_ids) < most_tokens and answer.token_ids[-1] not in ends for answer in self.answers)
        return max(len(answer.token_ids) for answer in self.answers) if cut else most_tokens

    def add(self, prompt_ids: Prompt, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.answers.append(Answer("", prompt_ids, tuple(token_ids)))
        self.logprobs.extend(logprobs)

    def to(self, prompts: Collection[Prompt]) -> "Answers":
        """Return those to the prompts alone."""
        chosen, place = Answers(), 0
        for answer in self.answers:
            end = place + len(answer.token_ids)
            if answer.prompt_ids in prompts:
                chosen.add(answer.prompt_ids, answer.token_ids, self.logprobs[place:end])
            place = end
        return chosen

    def beside(self, others: "Answers") -> "Answers":
        """Return these and then the others."""
        return Answers([*self.answers, *others.answers], [*self.logprobs, *others.logprobs])

    def read_by(self, learner: Engine) -> list[float]:
        """Return the trainer's logprobs of the tokens, with the weights that the learner has now."""
        return [logprob for logprobs in learner.logprobs_of(self.answers) for logprob in logprobs]

    def common_prompts(self, most: int) -> list[Prompt]:
        """Return the prompts with the most answers; of equally many the first."""
        return [prompt for prompt, _ in Counter(answer.prompt_ids for answer in self.answers).most_common(most)]


def tokens_of(prompts: Sequence[Prompt]) -> int:
    """Return the tokens that are read of these prompts: common beginnings are read once."""
    return len(prefix_trees.forest([prefix_trees.ids(prompt) for prompt in prompts]).token_ids_T)


def from_rows(rows: Sequence[Row], version: int, most_tokens: int) -> Answers:
    """Return the rows' first answers that `version` sampled as the probe does: at temperature 1, with no constraint.

    Each is cut off after `most_tokens` tokens, as the probe's are.
    """
    answers = Answers()
    for row in rows:
        start = row.sampled_T.index(True)
        constrained = bool(row.constrained) and row.constrained[0].start == start
        if constrained or row.versions_T[start] != version or row.temperatures_T[start] != 1.0:
            continue
        end = start
        while end < min(start + most_tokens, len(row.sampled_T)) and row.sampled_T[end]:
            end += 1
        answers.add(row.token_ids_T[:start], row.token_ids_T[start:end], row.inference_logprobs_T[start:end])
    return answers


def tokens_like_the_probes(rows: Sequence[Row], version: int) -> int:
    """Return how many tokens `version` sampled with no constraint; 0 if any of them was not at temperature 1.

    The step has measured k3 of server to trainer on these (`StepFigures.mismatch_k3`).
    """
    count = 0
    for row in rows:
        constrained = {place for span in row.constrained for place in range(span.start, span.end)}
        for place, (sampled_by, temperature) in enumerate(zip(row.versions_T, row.temperatures_T, strict=True)):
            if sampled_by == version and place not in constrained:
                if temperature != 1.0:
                    return 0
                count += 1
    return count
