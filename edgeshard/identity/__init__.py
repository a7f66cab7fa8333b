"""A site's certificates: its authority, and what each process keeps."""
