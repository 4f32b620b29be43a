"""`python -m ds_lite` is the `ds-lite` command."""

from ds_lite.cli import main

if __name__ == "__main__":
    main()
