"""Records as tables, pages and other files."""
