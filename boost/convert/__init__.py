"""Weights to and from the formats of others: Hugging Face folders out and in, and the low-rank start from dense weights."""
