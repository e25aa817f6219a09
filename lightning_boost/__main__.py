"""Entry point of ``python -m lightning_boost``."""

from lightning_boost.cli import main

if __name__ == "__main__":
    main()
