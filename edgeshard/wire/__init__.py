"""The only place that knows both protobuf messages and domain values."""
