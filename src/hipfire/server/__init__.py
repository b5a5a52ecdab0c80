"""The HTTP server: OpenAI's API, and Anthropic's and Ollama's as adapters over the same core."""
