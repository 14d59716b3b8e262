"""`python -m orinbench`."""

from orinbench.cli import main

if __name__ == "__main__":
    main()
