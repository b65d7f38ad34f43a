"""Make a transformers folder of a GGUF file.

`conversion` writes the folder and checks its answer; `tokenizer` builds the tokenizer from the file's metadata.
"""
