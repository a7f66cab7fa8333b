"""The CPU's compute operators: packed linear layers, norms, rotary embedding, paged attention and
sampling.

Each has a native kernel (`kernels.cpp`, built when EdgeShard is installed and chosen for the CPU at
run time) and a fallback in plain torch, for sampling in numpy, that gives the same numbers up to
the order of summation.
"""
