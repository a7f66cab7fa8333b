"""The order in which requests are computed: steps, KV blocks, chunks and fair shares. Pure."""
