"""Layers that models are assembled from; they hold weights and no state."""
