"""Reading and writing model files: HFQM containers, GGUF, safetensors; the registry and its downloads."""
