"""The routes: OpenAI's and Ollama's requests, and their way to the engine and back."""
