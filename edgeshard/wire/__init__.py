"""The only place where protobuf messages and domain values meet."""
