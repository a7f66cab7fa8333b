"""HTTP faces of a site: OpenAI's and Ollama's, for programs that speak nothing else."""
