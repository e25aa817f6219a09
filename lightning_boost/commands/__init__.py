"""What ``python -m lightning_boost`` can do beside Lightning's own subcommands."""
