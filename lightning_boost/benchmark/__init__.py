"""What is measured: ratios of interleaved runs, printed and never asserted."""
