"""Causal language models of transformers as pipelines (§9.9)."""
