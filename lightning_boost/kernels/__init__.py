"""Kernels: element-wise passes over hidden states and latents, each in one pass where torch makes several.

Each has a plain twin (``reference.py``) and runs in Triton where it can (``dispatch.py``).
"""
