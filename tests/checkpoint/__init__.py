"""Tests of checkpoint reading, configuration, tokenizer and loader."""
