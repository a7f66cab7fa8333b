"""Who belongs to the site: tokens, certificates, and whose are refused."""
