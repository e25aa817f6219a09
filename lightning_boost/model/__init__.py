"""The network as one process sees it: no word about other processes anywhere in this folder.

Shapes: ``B`` micro-batch, ``T`` tokens, ``D`` hidden, ``F`` intermediate, ``R`` bottleneck, ``V`` vocabulary,
``H`` heads, ``K`` key/value heads, ``E`` head size, ``L`` layers.
"""
