"""Settings of teachers: models that say how likely they find a policy's answers, for steps of the kind distill."""

from pydantic import Field

from whetstone.config.rewards import VARIABLE, Section, Url


class TeacherSettings(Section):
    """A vLLM server with a stronger model of the same tokenizer. It is asked for logprobs of prompts, so it must be
    started without LoRA, and for itself: the server of a policy is refused."""

    url: Url
    """Base URL of the server, including `/v1`: `http://teacher:8000/v1`."""
    model: str = Field(min_length=1)
    """The model's name on that server."""
    api_key_env: str | None = Field(None, pattern=VARIABLE)
    """Environment variable that holds its API key; unset: no key is sent."""
