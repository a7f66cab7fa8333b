"""Which experts will be needed, and which may go: decisions about a mixture's experts on storage. Pure."""
