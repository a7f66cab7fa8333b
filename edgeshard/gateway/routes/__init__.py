"""The routes: OpenAI's and Ollama's requests, and what they become."""
