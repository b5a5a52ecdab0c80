"""Loading a model, admission, running steps, sampling, stopping."""
