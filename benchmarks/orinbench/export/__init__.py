"""Records of a run: their fields, the forms that they are written and read in, the table."""
