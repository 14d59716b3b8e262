"""`orinbench device-check`: everything that only a real Orin can show, taken by one command."""
