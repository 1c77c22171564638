"""A language model of GPT-2 small's size on one GPU, by several optimizers: see ``__main__.py``."""
