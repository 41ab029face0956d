"""Exports and imports Hugging Face folders, and initializes low-rank models from dense weights."""
