"""Where a model's tensors lie when one box's memory is not enough: FlexGen's fractions over three tiers, by a linear
program, and what a box that streams its weights from disk costs the joint planner. Pure.
"""
