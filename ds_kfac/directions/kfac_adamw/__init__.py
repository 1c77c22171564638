"""KFACAdamW: Adam in the eigenbasis, with an optimizer of its own."""
