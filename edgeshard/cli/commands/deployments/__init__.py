"""Commands about models, plans and deployments."""
