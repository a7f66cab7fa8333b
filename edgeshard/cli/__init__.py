"""edgectl, one file per noun. Commands import gRPC, pydantic and the client when they run, so
`--help` is quick."""
