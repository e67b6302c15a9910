"""`python -m trainspan_cli` is `trainspan`."""

from trainspan_cli.main import main

if __name__ == "__main__":
    main()
