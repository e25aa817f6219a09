"""Text in, token ids out: sources, tokenizer and packing, with no word about training."""
