"""Values to text: tables, views, bars and pictures of the terminal."""
