"""Models in the forms people have them: from the Hub, as GGUF, quantised by others; all end as a
`Checkpoint`."""
