"""Models that other programs have on this machine: Ollama's store and LM Studio's folder."""
