"""What coordinator, agents and operators tell each other of the site."""
