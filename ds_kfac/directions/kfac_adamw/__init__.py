"""KFACAdamW: Adam in the eigenbasis, with an optimizer that DeepSpeed steps."""
