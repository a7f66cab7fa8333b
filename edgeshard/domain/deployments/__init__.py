"""Deployments: what an operator asks for, which node holds which layers, and what they served."""
