"""Write a GGUF model as a transformers folder, and check the folder. transformers dequantises the weights."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from trainer.errors import ModelUnusable
from trainer.learner.gguf.tokenizer import tokenizer_of

ROUND_TRIP = "Dear  Mr Müller,\n\tyour invoice 20481 isn't paid: 19.90 € — 木\n"
"""A text with what tokenizers lose: repeated spaces, digits, accents, other scripts."""
MAX_ANSWER_TOKENS = 24


def convert(gguf: Path, template: str, dtype: str, folder: Path, question: str, answer: str) -> None:
    """Write the folder, and read it as vLLM and the trainer do: `answer` must occur in the likeliest answer.

    Raises:
        ModelUnusable: the file is not one that we can convert, or the written model does not answer so.
    """
    transformers_logging.disable_progress_bar()
    tokenizer = tokenizer_of(gguf, template)
    _model(gguf, tokenizer).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    check(folder, question, answer)


def check(folder: Path, question: str, answer: str) -> None:
    """Check a written folder: texts come back from the tokenizer, and the model knows the answer.

    Raises:
        ModelUnusable: one of both fails.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    back = tokenizer.decode(tokenizer.encode(ROUND_TRIP))
    if back != ROUND_TRIP:
        raise ModelUnusable(f"{folder}: its tokenizer makes {back!r} of {ROUND_TRIP!r}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)[0]
    text = tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if answer not in text:
        raise ModelUnusable(f"{folder}: asked {question!r} it answers {text!r}, without {answer!r}")


def _model(gguf: Path, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return the model with its weights as plain parameters: transformers does not save one that it calls quantised."""
    try:
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except (OSError, ValueError, ImportError) as error:
        raise ModelUnusable(f"{gguf}: transformers does not read it: {error}") from error
    described = read.config.to_dict()
    for of_the_file in ("quantization_config", "_name_or_path"):
        described.pop(of_the_file, None)
    config = type(read.config)(**described)
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    # Answers end at the end of a message, and at the end of a text.
    ends = [tokenizer.eos_token_id, tokenizer.unk_token_id]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    return model
