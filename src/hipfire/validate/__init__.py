"""Comparisons that prove a claim: relative RMS, KL divergence, perplexity."""
