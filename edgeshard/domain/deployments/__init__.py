"""Deployments: the operator's request, the layers of each node, and the traffic they served."""
