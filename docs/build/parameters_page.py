"""The page of what each field of a request does to the sampling, made from the table of the proxy."""

from proxy.wire.parameters import GROUPS, Effect
from proxy.wire.request_body import DEADLY, REFUSED

_HEAD = """# What each parameter does to training

Every field of OpenAI's and of vLLM's requests (chat and completions) is in one of three classes, the same in every
dialect: what becomes of a Messages or Responses request is a chat.

- **Neutral**: vLLM ignores it, or it changes only the prompt, whose ids are recorded, the answer's form, or where the
  answer ends. The tokens are those of the model at its temperature.
- **Weighed**: it bends the distribution that the tokens are sampled from, and the trainer accounts for it
  ([how](training.md)). `admin_completions.constraints` has what was set, without values that change nothing; NULL if
  nothing was. Tokens that a constraint decided teach nothing; `decided_tokens` counts them, and an attempt of
  nothing else is `constrained`.
- **Never**: it bends the distribution in a way that ids and logprobs do not show. The call is answered and recorded all
  the same, and `why_not_trained` names the field: `sampling_bent: bad_words`; at temperature 0 it is `greedy`.

A field that is in none of them is answered too, and named: `sampling_bent: <field>`. Null counts as left out.
"""
_TAIL = """## Beside the three classes

Refused with 400, as they reach into the server or would stop it: {refused}.

A message with an image, audio or a file is answered and recorded; no step reads it: `media`.

Two arguments of vLLM change what is written above, and the proxy does not see them: `--tool-strict-level` other than
`auto` sets a grammar for all tools, and Mistral's tokenizers and the parser of GLM 4.7 set one for every request with
tools. Such a grammar is not recorded.
"""


def page(made: str) -> str:
    """Return the page; `made` says what it is made from."""
    lines = [made, _HEAD, "| class | fields | what they do | where vLLM 0.32 shows it |\n|---|---|---|---|"]
    for effect in Effect:
        for group in GROUPS:
            if group.effect is effect:
                names = ", ".join(f"`{name}`" for name in group.names.split())
                lines.append(f"| {effect} | {names} | {group.meaning} | {group.source} |")
    refused = ", ".join(f"`{name}`" for name in sorted(REFUSED | DEADLY))
    return "\n".join([*lines, "", _TAIL.format(refused=refused)])
