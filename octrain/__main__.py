"""``python -m octrain`` is the `octrain` command."""

from octrain.cli import main

if __name__ == "__main__":
    main()
