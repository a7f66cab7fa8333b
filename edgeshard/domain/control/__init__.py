"""Messages of coordinator, agents and operators about the site."""
