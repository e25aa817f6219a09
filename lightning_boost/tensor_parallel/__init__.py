"""The tensor axis: one-process modules are replaced, in place, by twins that hold a share of the features."""
