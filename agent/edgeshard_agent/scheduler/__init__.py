"""Who is computed when: steps, KV blocks, chunks and fair shares. Pure."""
