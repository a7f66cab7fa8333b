"""EdgeShard itself on a machine: how it was installed, and folders of wheels that upgrade it."""
